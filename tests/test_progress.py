"""What people see of a long load: bytes, rate and time left; nothing where nobody asked."""
import pytest

from k3cuda.runtime import progress
from k3cuda.runtime.progress import LoadProgress


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until its list gets another time."""
    times = [100.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: times[-1])
    return times


def test_a_plain_line_every_ten_seconds(clock, capsys):
    shown = LoadProgress(100 * 10**9, is_terminal=False)
    for second in range(25):
        clock.append(101.0 + second)
        shown.add(2 * 10**9)
    shown.close()
    assert capsys.readouterr().err.splitlines() == [
        "loading 20.00 of 100.00 GB, 20%, 2.00 GB/s, 40 s left", "loading 40.00 of 100.00 GB, 40%, 2.00 GB/s, 30 s left"]


def test_a_bar_on_a_terminal(clock, capsys):
    shown = LoadProgress(1000 * 10**9, verb="hashing", is_terminal=True)
    clock.append(100.1)
    shown.add(10**9)   # too soon
    clock.append(110.0)
    shown.add(99 * 10**9)
    shown.close()
    assert capsys.readouterr().err == "\r\033[Khashing [##..................] 100.00 of 1000.00 GB, 10%, 10.00 GB/s, 1 min 30 s left\r\033[K"


def test_short_loads_and_those_nobody_watches_show_nothing(clock, capsys, monkeypatch):
    quick = LoadProgress(10**9, is_terminal=False)
    clock.append(109.0)
    quick.add(10**9)
    unwatched = LoadProgress(10**9, show=False, is_terminal=True)
    clock.append(200.0)
    unwatched.add(10**9)
    quick.close()
    unwatched.close()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress.sys, "stderr", None)   # closed by whoever started us
    gone = LoadProgress(10**9)
    clock.append(300.0)
    gone.add(10**9)
    gone.close()


@pytest.mark.parametrize("seconds, text", [(0.4, "0 s"), (59.6, "1 min 0 s"), (3725, "1 h 2 min")])
def test_times(seconds, text):
    assert progress._time(seconds) == text
