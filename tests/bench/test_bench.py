"""The benchmarks' arithmetic: what is counted, compared, drawn and written, without measuring anything."""

import random
import re
import xml.etree.ElementTree as ET
from contextlib import ExitStack
from pathlib import Path

import pytest

from bench.arms.commits import ROOT
from bench.arms.postgres import processes
from bench.benchmarks import commits
from bench.harness.contest import Task, arm
from bench.harness.figures import Figure, Reached, Row, compare, number, of_rates, percentile, ratio, within
from bench.harness.race import Arm, Course, Timed, Unavailable, timed, timed_inline
from bench.pages import charts, documents, report, tables
from bench.probes import stopped

pytestmark = pytest.mark.slow


def reached(name: str, *rates: float, kept: str = "") -> Reached:
    figures = {"rate": Figure(name, "/s", rates)}
    figures |= {f"p{percent}": Figure(f"{name}, p{percent}", "ms", (percent / 100,)) for percent in (50, 95, 99)}
    return Reached(name, figures, kept)


# Figures


def test_a_ratio_is_taken_round_by_round() -> None:
    found = ratio(Figure("a", "/s", (10, 100, 30)), Figure("b", "/s", (5, 10, 30)))
    assert found.rounds == (2, 10, 1)
    assert found.median == 2


def test_a_bar_is_met_by_reaching_it_and_a_limit_by_not_passing_it() -> None:
    assert compare(Figure("a", "/s", (9,)), Figure("b", "/s", (10,)), at_least=0.9).ok
    assert not compare(Figure("a", "/s", (8,)), Figure("b", "/s", (10,)), at_least=0.9).ok
    assert within(Figure("a", "ms", (5,)), 5).ok
    assert not within(Figure("a", "ms", (5.1,)), 5).ok


def test_an_arm_that_took_no_part_has_no_verdict() -> None:
    found = {"keyloft": reached("keyloft", 10)}
    assert of_rates(found, "keyloft", {"a peer": 2}) == ()


def test_percentiles_are_of_the_sample() -> None:
    sample = [float(one) for one in range(100, 0, -1)]
    assert [percentile(sample, percent) for percent in (50, 95, 99)] == [51, 96, 100]
    assert percentile([7.0], 99) == 7


@pytest.mark.parametrize(
    ("amount", "shown"), [(137_812.4, "137,812"), (41.27, "41.3"), (1.4, "1.40"), (0.0049, "0.0049"), (0, "0.00")]
)
def test_numbers_show_three_digits_or_so(amount: float, shown: str) -> None:
    assert number(amount) == shown


# Commits


def test_this_tree_races_the_code_of_another_commit(tmp_path: Path) -> None:
    with ExitStack() as closing:
        benchmark = commits.prepared(True, tmp_path, closing, "HEAD")
        row = benchmark.rows["check-and-set"]()
    assert (tmp_path / "src" / "keyloft" / "__init__.py").exists(), "the other commit's code was taken from git"
    assert [arm.name for arm in row.arms] == ["Keyloft, this tree", "Keyloft, HEAD"]
    assert row.arms[0].rate.median > 0


def test_an_unknown_commit_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--against no-such-commit: "), ExitStack() as closing:
        commits.prepared(True, tmp_path, closing, "no-such-commit")


# PostgreSQL


def test_processes_share_a_database_and_each_makes_its_part_of_the_sums(postgres_url: str, tmp_path: Path) -> None:
    task = Task("sums", "", "sum", workers=8)
    entrants = [processes.entrant(f"{count}", ROOT / "src", postgres_url, count) for count in (1, 2)]
    with Course(tmp_path, rounds=1) as course:
        found = course.race([arm(entrant, task, 10, operations=100) for entrant in entrants])
    assert found["1"].rate.median > 0 < found["2"].rate.median


def test_a_client_is_stopped_and_goes_on(postgres_url: str) -> None:
    row = stopped.beside_a_stopped_client(postgres_url, 2, 0.05)
    assert len(row.figures[1].rounds) == 2
    assert row.verdicts[0].bar == 1500


# Races


class Counter:
    def __init__(self) -> None:
        self.done = 0
        self.open = True


def counting(
    name: str, log: list[str], *, wrong: bool = False, home: str | None = None
) -> Arm[Counter, list[int], int]:
    def run(counter: Counter, plan: list[int]) -> Timed[int]:
        log.append(name)
        counter.done += len(plan)
        return Timed([one + wrong for one in plan], [0.001] * len(plan), 0.001 * len(plan))

    def check(counter: Counter, plan: list[int], lap: Timed[int]) -> None:
        assert counter.open
        assert lap.answers == plan

    def close(counter: Counter) -> None:
        counter.open = False

    def plan(_: random.Random, operations: int) -> list[int]:
        return list(range(operations))

    return Arm(name, 10, lambda _: Counter(), plan, run, check, close, lap=4, home=home)


def test_every_round_runs_each_arm_once(tmp_path: Path) -> None:
    log: list[str] = []
    with Course(tmp_path, rounds=5) as course:
        found = course.race([counting(name, log) for name in "abc"])
    order = re.sub(r"(.)\1\1", r"\1", "".join(log))  # a round is three laps: 4, 4 and 2 operations
    assert [set(order[first : first + 3]) for first in range(0, 18, 3)] == [set("abc")] * 6
    assert len({order[first : first + 3] for first in range(0, 18, 3)}) > 1, "the order is left to chance"
    assert found["a"].rate.rounds == pytest.approx([1000.0] * 5), "the warm-up does not count"
    assert found["a"].figures["p99"].median == pytest.approx(1.0)


def test_an_arm_that_reads_something_else_ends_the_race(tmp_path: Path) -> None:
    with Course(tmp_path, rounds=1) as course, pytest.raises(AssertionError):
        course.race([counting("liar", [], wrong=True)])


def test_an_arm_that_is_unavailable_is_named_with_the_reason(tmp_path: Path) -> None:
    def nowhere(_: Path) -> Counter:
        raise Unavailable("it is not installed")

    there = counting("there", [])
    gone = Arm("gone", 1, nowhere, there.plan, there.run, there.check, there.tear_down)
    with Course(tmp_path, rounds=1) as course:
        assert list(course.race([there, gone])) == ["there"]
        assert course.absent == {"gone": "it is not installed"}


def test_arms_of_one_home_share_a_store_until_the_course_ends(tmp_path: Path) -> None:
    seen: list[Counter] = []

    def watched(arm: Arm[Counter, list[int], int]) -> Arm[Counter, list[int], int]:
        def run(counter: Counter, plan: list[int]) -> Timed[int]:
            seen.append(counter)
            return Timed(plan, [1.0] * len(plan), 1.0)

        return Arm(arm.name, 1, arm.set_up, arm.plan, run, arm.check, arm.tear_down, home=arm.home)

    with Course(tmp_path, rounds=1) as course:
        course.race([watched(counting("one", [], home="house"))])
        course.race([watched(counting("two", [], home="house"))])
        assert len({id(counter) for counter in seen}) == 1
        assert seen[0].open
    assert not seen[0].open


async def test_timed_calls_give_their_answers_in_order() -> None:
    async def double(ask: int) -> int:
        return 2 * ask

    for done in (
        timed_inline(lambda ask: 2 * ask, range(9)),
        await timed(double, range(9)),
        await timed(double, range(9), workers=4),
    ):
        assert done.answers == [2 * ask for ask in range(9)]
        assert 0 <= max(done.seconds) <= done.took


# Tables


def peers() -> Row:
    arms = (
        reached("Keyloft", 100, 120, 110, kept="on disk"),
        reached("Deno KV", 50, 60, 55, kept="on disk"),
        reached("faster", 200, 240, 220, kept="on disk"),
        reached("careless", 900, 900, 900, kept="the last may be lost"),
        reached("apsw (the limit)", 150, 150, 150, kept="on disk"),
    )
    verdicts = (compare(arms[0].rate, arms[1].rate, 3),)
    return Row("durable set", arms, "Keyloft", verdicts=verdicts, absent={"bun": "neither bun nor npm is installed"})


def test_a_table_of_bars_has_the_bar_beside_the_ratio() -> None:
    assert "| durable set | Keyloft : Deno KV | ≥ 3.00 × | 2.00 × (2.00 … 2.00) | **MISS** |" in tables.bars([peers()])


def test_a_matrix_has_dashes_for_what_is_not_known_and_bold_for_what_wins() -> None:
    rows = {"set": peers(), "get": Row("get", (reached("Keyloft", 5),), "Keyloft")}
    shown = tables.matrix(rows, ("set", "get"), ("Keyloft", "faster", "careless"))
    lines = ["| Keyloft | 110 | 5.00 |", "| faster | **220** | – |", "| careless | **900** † | – |"]
    assert shown.splitlines()[2:] == lines


def test_losing_rows_are_left_in() -> None:
    lost = tables.losses([peers()])
    assert "| faster | 2.00 × (2.00 … 2.00) |" in lost
    assert "careless" in lost
    assert "Deno KV" not in lost
    assert "the limit" not in lost, "it is less than twice away"
    short = tables.best({"set": peers()}, (), {"set": "Deno KV"})
    assert "| durable set | 110 /s | faster | **0.50 ×** | Deno KV: 2.00 × |" in short, "careless is less durable"


def test_an_absent_arm_is_in_the_table_with_its_reason() -> None:
    assert "| bun | – (neither bun nor npm is installed) |" in tables.of_row(peers())


# Charts and pages


def test_labels_are_moved_apart_and_keep_their_order() -> None:
    moved = charts.apart([100, 101, 99, 300], 16)
    assert sorted(moved) == sorted(moved, key=lambda position: position)
    assert moved[2] < moved[0] < moved[1] < moved[3]
    gaps = [high - low for low, high in zip(sorted(moved), sorted(moved)[1:], strict=False)]
    assert min(gaps) == pytest.approx(16, abs=0.1)


@pytest.mark.parametrize(("amount", "shown"), [(5_000_000, "5M"), (137_812, "138k"), (1500, "1.5k"), (0.05, "0.05")])
def test_ticks_are_short(amount: float, shown: str) -> None:
    assert charts.short(amount) == shown


def test_charts_are_well_formed_and_their_bars_grow_with_the_figures() -> None:
    made = [charts.Bar("a & b", 1000, 900, 1100, "keyloft"), charts.Bar("c", 10, 9, 11)]
    drawn = ET.fromstring(charts.bars("<title>", [charts.Panel("get", tuple(made))]))
    widths = [float(rect.get("width", "")) for rect in drawn.iter("{http://www.w3.org/2000/svg}rect")][1:]
    assert widths[0] > widths[1] > 0
    line = charts.LineSeries("get", ((1000, 5), (1_000_000, 7)), ("x", "y"))
    ET.fromstring(charts.lines("growth", "of all", "keys", "µs", [line, line]))


def test_a_page_keeps_what_is_written_by_hand() -> None:
    page = "before\n<!-- measured one -->\nold\n<!-- /measured -->\nafter"
    filled = documents.filled(page, {"one": "new"})
    assert filled == "before\n<!-- measured one -->\nnew\n<!-- /measured -->\nafter"
    assert documents.filled(filled, {"one": "new"}) == filled
    with pytest.raises(KeyError):
        documents.filled(page, {})


def test_the_pages_show_what_the_results_say(tmp_path: Path) -> None:
    """All parts that the pages name are made, with results and without."""
    for page in documents.PAGES:
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / page).write_text((documents.ROOT / page).read_text())
    lines: list[str] = []
    documents.write(lines.append, tmp_path, tmp_path / "none")
    assert documents.NOT_YET in (tmp_path / "README.md").read_text()

    rows = {"set": peers(), "get": Row("get", (reached("Keyloft", 5), reached("Deno KV", 1)), "Keyloft")}
    results = report.Results({"cpu": "two"}, ["a note"], rows)
    report.save(tmp_path / "results" / "peers.json", results)
    assert report.load(tmp_path / "results" / "peers.json") == results
    documents.write(lines.append, tmp_path, tmp_path / "results")
    assert (tmp_path / "docs/benchmarks/short.svg").exists()
    assert "](docs/benchmarks/short.svg)" in (tmp_path / "README.md").read_text()
    assert "](benchmarks/short.svg)" in (tmp_path / "docs/benchmarks.md").read_text()
    assert "### durable set\n" in (tmp_path / documents.ALL_FIGURES).read_text()


def test_the_pages_are_rendered_from_the_committed_results(tmp_path: Path) -> None:
    for page in documents.PAGES:
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / page).write_text((documents.ROOT / page).read_text())
    documents.write(lambda line: None, tmp_path)
    for page in (*documents.PAGES, documents.ALL_FIGURES):
        assert (tmp_path / page).read_text() == (documents.ROOT / page).read_text(), "run scripts/bench report"


def test_the_summary_stays_short() -> None:
    assert len((documents.ROOT / "docs/benchmarks.md").read_text().split()) <= 3000
