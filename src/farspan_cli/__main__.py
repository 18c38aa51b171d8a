"""`python -m farspan_cli`, for launchers that start modules."""

from farspan_cli import main

if __name__ == "__main__":
    main()
