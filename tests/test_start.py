"""The first commands of a new user."""

from importlib.metadata import version

from tests.command_line import called


def test_doctor_names_versions_and_what_runs() -> None:
    status, out, err = called("doctor")
    assert status == 0
    assert not err
    assert f"torch {version('torch')}" in out
    for name in ("masked_kernel", "decode_", "chunked"):  # where they run, or why they do not
        assert name in out
    assert max(map(len, out.splitlines())) <= 80
