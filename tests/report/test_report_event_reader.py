"""Events are read while a record grows, and damaged lines are skipped."""

from __future__ import annotations

from pathlib import Path

from narrowgauge.report.event_reader import EventReader
from narrowgauge.runs import record


def test_event_reader_continues_and_skips_damaged_lines(tmp_path: Path) -> None:
    reader = EventReader(tmp_path)
    assert list(reader.read()) == [] and not reader.was_replaced()
    path = tmp_path / record.EVENTS
    path.write_bytes(b'{"kind":"step","step":1}\nnot json\n[1]\n{"kind":"st')
    reader.was_replaced()
    assert [event["step"] for event in reader.read()] == [1] and reader.damaged == 2
    with path.open("ab") as file:
        file.write(b'ep","step":2}\n')
    assert not reader.was_replaced()
    assert [event["step"] for event in reader.read()] == [2] and list(reader.read()) == []
    other = tmp_path / "other"
    other.write_bytes(b'{"kind":"step","step":9}\n')
    other.replace(path)
    assert reader.was_replaced() and [event["step"] for event in reader.read()] == [9] and reader.damaged == 0
