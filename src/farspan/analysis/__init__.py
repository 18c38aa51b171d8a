"""Numbers about attention first, figures second."""
