"""Every format gives the same documents, and damaged input raises with file, position and remedy."""

import gzip
import json
import lzma
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from farspan.data import documents
from tests.data.corpora import jsonl, texts

TEXTS = texts(200)
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: pa.compress(data, "zstd", asbytes=True),
}


def read(path: Path, field: str = "text") -> list[str]:
    return [document.text for document in documents(str(path), field)]


@pytest.mark.parametrize("suffix", ["", *COMPRESS])
def test_json_lines_round_trip_also_in_several_frames(suffix: str, tmp_path: Path) -> None:
    lines = jsonl(tmp_path / "a.jsonl", TEXTS).read_bytes()
    half, path = len(lines) // 2, tmp_path / f"a.jsonl{suffix}"
    for parts in ([lines], [lines[:half], lines[half:]]):
        path.write_bytes(b"".join(COMPRESS.get(suffix, bytes)(part) for part in parts))
        found = list(documents(str(path)))
        assert [document.text for document in found] == TEXTS
        assert found[6].name == f"{path}:7"


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("keep", [0.2, 0.7, 0.999])
def test_truncated_compressed_files_raise(suffix: str, keep: float, tmp_path: Path) -> None:
    data = COMPRESS[suffix](jsonl(tmp_path / "a.jsonl", TEXTS).read_bytes())
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(ValueError, match=rf"a\.jsonl\{suffix} must be a complete .* before byte \d+ of .*again"):
        read(path)


def test_text_round_trips_byte_for_byte(tmp_path: Path) -> None:
    text = "\r\none\r\ntwo\n\n  three\x0c é"
    (tmp_path / "a.md").write_bytes(b"\xef\xbb\xbf" + text.encode())
    (tmp_path / "b.txt.xz").write_bytes(lzma.compress(text.encode()))
    assert read(tmp_path / "a.md") == read(tmp_path / "b.txt.xz") == [text]


def test_parquet_round_trips_over_row_groups(tmp_path: Path) -> None:
    table = pa.table({"n": list(range(len(TEXTS))), "body": TEXTS})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=33)
    assert read(tmp_path / "a.parquet", "body") == TEXTS


def test_a_directory_is_its_text_files_sorted(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.py", "c.md", ".hidden.txt", "d.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"in {name}")
    (tmp_path / "a" / "__init__.py").write_text("")
    assert read(tmp_path) == ["in a/z.py", "in b.txt", "in c.md"]


def test_the_standard_library_is_long_sorted_and_without_tests() -> None:
    found = list(documents("stdlib"))
    names = [document.name for document in found]
    assert names == sorted(names)
    assert "stdlib:argparse.py" in names
    assert not any("/test/" in name or "/tests/" in name or "site-packages" in name for name in names)
    assert max(len(document.text) for document in found) > 100_000
    assert sum(len(document.text) for document in found) > 5_000_000


def test_a_hub_dataset_is_streamed_with_its_configuration_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"reading hf:deepmind/pg19::test needs .* pip install datasets"):
        next(documents("hf:deepmind/pg19::test"))

    class Datasets:
        @staticmethod
        def load_dataset(name: str, config: str | None, *, split: str, streaming: bool) -> list[dict[str, str]]:
            assert streaming
            return [{"text": f"{name} {config} {split}"}, {"text": " "}]

    monkeypatch.setitem(sys.modules, "datasets", Datasets)
    assert [d.text for d in documents("hf:a/b")] == ["a/b None train"]
    assert [d.text for d in documents("hf:a/b::test")] == ["a/b None test"]
    assert [d.text for d in documents("hf:a/b:en:valid")] == ["a/b en valid"]
    for name in ("hf:", "hf::test", "hf:a:b:c:d"):
        with pytest.raises(ValueError, match=r"source must be hf:NAME\[:CONFIG\]\[:SPLIT\], got 'hf:"):
            documents(name)


GOOD = json.dumps({"text": "fine"})
BAD = {
    "empty.txt": (b"", r"empty\.txt must hold text, got nothing but white space; remove"),
    "binary.txt": (b"abc\0def", "must be text, got binary data .*offset 3"),
    "latin.txt": ("né".encode("latin-1"), "must be UTF-8 text, got the byte 0xe9 at offset 1; convert"),
    "empty.jsonl": (b"", r"at least one document, got '.*empty\.jsonl'"),
    "hole.jsonl": (f'{GOOD}\n{{"text": ""}}\n'.encode(), r"hole\.jsonl:2 must hold text"),
    "broken.jsonl": (f'{GOOD}\n{{"text": "a\n'.encode(), r"broken\.jsonl:2 must be one JSON object per line"),
    "deep.jsonl": (
        b'{"text": "a", "n": ' + b"[" * 10**5 + b"]" * 10**5 + b"}",
        r"deep\.jsonl:1 must be one JSON object",
    ),
    "half.jsonl": (b'{"text": "a\\ud800"}\n', r"half\.jsonl:1 must be valid Unicode, .*character 1; repair"),
    "field.jsonl": (b'{"texts": "a"}\n', r"field\.jsonl:1: field must be one of 'texts', got 'text'; name the one"),
    "number.jsonl": (b'{"text": 3}\n', r"number\.jsonl:1: field 'text' must hold text, got 3; choose"),
    "not.parquet": (b"PAR1 no", r"not\.parquet must be a complete \.parquet file"),
    "what.xyz": (b"a", r"known ending, got '.*what\.xyz'; give a file \.txt"),
    "not.jsonl.gz": (b"plain text", r"not\.jsonl\.gz must be a complete \.gz file"),
    "not.jsonl.xz": (b"plain text", r"not\.jsonl\.xz must be a complete \.xz file"),
    "not.jsonl.zst": (b"plain text", r"not\.jsonl\.zst must be a complete \.zst file"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_raises_with_file_position_and_remedy(name: str, tmp_path: Path) -> None:
    data, message = BAD[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=message):
        read(tmp_path / name)


def test_missing_files_empty_directories_and_wrong_columns_raise(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"source must exist, got '.*gone\.txt'; give"):
        read(tmp_path / "gone.txt")
    with pytest.raises(ValueError, match="must hold text files"):
        read(tmp_path)
    pq.write_table(pa.table({"body": ["a"], "n": [1]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet: field must be one of 'body', 'n', got 'bodi'; name the one"):
        read(tmp_path / "a.parquet", "bodi")
    with pytest.raises(ValueError, match=r"a\.parquet:1: field 'n' must hold text, got 1"):
        read(tmp_path / "a.parquet", "n")
