"""Records: whole at any moment, refused when they are none."""

from __future__ import annotations

import json
import os

import pytest

from vllm_csf.bench import records
from vllm_csf.bench.records import BenchError

RECORD = {"machine": {"gpu": None}, "commit": "c", "rows": [{"us": 1.5, "arm": "csf"}, {"us": 2, "arm": "x"}]}


def test_round_trip_and_one_row_a_line(tmp_path):
    path = tmp_path / "new" / "record.json"
    records.write(RECORD, path)
    assert records.read(path, "kernels") == RECORD
    assert sum('"arm"' in line for line in path.read_text().splitlines()) == 2


def test_a_write_that_dies_leaves_the_last_record(tmp_path, monkeypatch):
    path = tmp_path / "record.json"
    records.write(RECORD, path)

    def die(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", die)
    with pytest.raises(OSError, match="no space"):
        records.write(RECORD | {"rows": []}, path)
    assert records.read(path) == RECORD


def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path):
    there, link = tmp_path / "there" / "record.json", tmp_path / "link.json"
    link.symlink_to(there)  # leads to nothing yet
    for record in (RECORD, RECORD | {"commit": "d"}):
        records.claim(link)
        records.write(record, link)
        assert link.is_symlink()
        assert records.read(there) == record
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["link.json", "record.json", "there"]


def test_what_is_no_file_is_not_replaced(tmp_path):
    pipe, loop = tmp_path / "pipe", tmp_path / "loop"
    os.mkfifo(pipe)
    loop.symlink_to(loop)
    (tmp_path / "link").symlink_to(pipe)
    for name, said in (
        ("pipe", "which is a pipe, expected a file"),
        ("link", "which is a pipe, expected a file"),
        (".", "which is a folder, expected a file"),
        ("loop", "cannot be written: too many levels of symbolic links"),
    ):
        with pytest.raises(BenchError, match=f"--out.*{said}"):
            records.claim(tmp_path / name)
    assert len(list(tmp_path.iterdir())) == 3
    assert pipe.is_fifo()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "record.json"),
        ("[]", "no record, expected a record of serve"),
        ('{"rows": 3}', "no record"),
        (json.dumps(RECORD), "is kernels, expected a record of serve"),
    ],
)
def test_what_is_no_record_of_the_kind_is_refused(tmp_path, content, said):
    path = tmp_path / "record.json"
    path.write_text(content)
    with pytest.raises(BenchError, match=said):
        records.read(path, "serve")


@pytest.mark.parametrize("value", ["0", "-5", "NaN", "Infinity", "true", "null", '"1"'])
@pytest.mark.parametrize(
    "record", ['{"rows": [{"us": 1, "us_max": 2}, {"us": %s}]}', '{"windows": [{}, {"output_tok_s": %s}]}']
)
def test_what_was_measured_is_a_number_above_zero(tmp_path, record, value):
    path = tmp_path / "record.json"
    path.write_text(record % value)
    with pytest.raises(BenchError, match=r"\[1\]\.(us|output_tok_s) is .*, expected a number above 0"):
        records.read(path)


def test_numbers_too_large_to_draw_make_no_whole_record(tmp_path):
    with pytest.raises(BenchError, match="is no whole record"), records.whole(tmp_path):
        raise OverflowError("math range error")


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(BenchError, match=r"nothing\.json"):
        records.read(tmp_path / "nothing.json")
