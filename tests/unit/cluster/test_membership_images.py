"""What a generation goes back to when an owner is lost: images of the state that lie in memory of several nodes.

By stories, by hostile JSON, and by search, as in test_membership.py. The search has a small model of workers that
begin images after steps, have their parts in their own memory and in that of the next member, and die in between
(tests/support/membership_images.py). A rule that is left out has to be caught by a story, or by the search.
"""

from __future__ import annotations

import collections
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

import pytest

from hetseq.cluster.membership import decide as membership
from hetseq.cluster.membership.decide import Image, Record, Report, decide
from hetseq.cluster.membership.step_commit import Lineage
from tests.support.membership_images import (
    ALL_SEALED,
    ANSWER,
    FREED,
    KEPT,
    KNOWN,
    TWICE,
    ImageSearch,
)
from tests.support.membership_model import (
    APPLY,
    Broken,
    Budget,
    History,
    Plan,
    Rule,
    Story,
    Worker,
    holds,
    lineage,
    made,
)

ONE: History = ((1, 0, 0, APPLY),)
TWO: History = (*ONE, (2, 0, 0, APPLY))
THREE: History = (*TWO, (3, 0, 0, APPLY))
TWO_LATER: History = (*ONE, (2, 1, 0, APPLY))


def image(history: History, *parts: int, of: int = 3, generation: int = 0) -> Image:
    """Parts of the image that this generation made of this state."""
    return Image(f"image of {generation}, {history}", lineage(history), generation, parts, of)


def owner(name: str, history: History, owned: int, *images: Image, **other: Any) -> Report:
    """The report of a worker that owns so many of eight elements."""
    report = made(name, history, part=(owned, 8)) if history else holds(name, history, part=(owned, 8))
    return replace(report, images=images, **other)


ONE_IS_LOST = "rank 1 owned 25 % of the state, and no other rank holds it"
LATER = Record(1, ("A", "C"), lineage(ONE), fresh=frozenset("AC"), lost="rank 1 owned all", image=image(ONE, 0).plan)
# B is dead. It owned a quarter, and its part of images lies with C.
STORIES = {
    "the second place of the lost part is alive, so all read the image": Story(
        (owner("A", THREE, 5, image(TWO, 0)), owner("C", THREE, 1, image(TWO, 1, 2))),
        "AC", TWO, "AC", lost=ONE_IS_LOST, image=image(TWO, 0).plan,
    ),
    "newcomers read it too": Story(
        (owner("A", THREE, 5, image(TWO, 0)), owner("C", THREE, 1, image(TWO, 1, 2))),
        "ACD", TWO, "ACD", newcomers="D", lost=ONE_IS_LOST, image=image(TWO, 0).plan,
    ),
    "one part of the newest image was under way: all read the one before": Story(
        (owner("A", TWO, 5, image(ONE, 0), image(TWO, 0)), owner("C", TWO, 1, image(ONE, 1, 2), image(TWO, 2))),
        "AC", ONE, "AC", lost=ONE_IS_LOST, image=image(ONE, 0).plan,
    ),
    "a checkpoint is newer": Story(
        (owner("A", THREE, 5, image(ONE, 0), saved=1), owner("C", THREE, 1, image(ONE, 1, 2), saved=2)),
        "AC", None, "AC", lost=ONE_IS_LOST,
    ),
    "a checkpoint of the same step is not read, since memory is faster": Story(
        (owner("A", THREE, 5, image(TWO, 0), saved=2), owner("C", THREE, 1, image(TWO, 1, 2))),
        "AC", TWO, "AC", lost=ONE_IS_LOST, image=image(TWO, 0).plan,
    ),
    "a checkpoint that only a worker without a vote knows of does not count": Story(
        (
            owner("A", THREE, 5, image(TWO, 0), generation=1), owner("C", THREE, 1, image(TWO, 1, 2), generation=1),
            owner("E", THREE, 0, saved=3),
        ),
        "AC", TWO, "AC", lost=ONE_IS_LOST, image=image(TWO, 0).plan, newest=Record(1, ("A", "B", "C"), lineage(ONE)),
    ),
    "two owners are dead whose parts lay with each other": Story(
        (owner("A", THREE, 5, image(TWO, 0)),),
        "A", None, "A", lost="ranks 1 and 2 owned 37.5 % of the state, and no other rank holds it",
    ),
    "the dead one owned nothing: the state is there, and no image is read": Story(
        (owner("A", THREE, 5, image(TWO, 0, 1)), owner("C", THREE, 3, image(TWO, 1, 0))), "AC", THREE, last=THREE
    ),
    "replicas hold the state, whatever images they report": Story(
        (made("A", THREE, images=(image(TWO, 0, 1, 2),)), holds("C", TWO, images=(image(TWO, 0, 1, 2),))),
        "AC", THREE, "C", last=THREE,
    ),
    "a generation that was to read an image ended before it held a state: the image again, and why": Story(
        (holds("A", None, generation=1, images=(image(ONE, 0, 2, 1),)),),
        "A", ONE, "A", newest=LATER, lost="rank 1 owned all", image=image(ONE, 0).plan,
    ),
    "one member has read the image, and the others have not: what it owns is not all": Story(
        (
            owner("A", ONE, 4, image(ONE, 0), generation=1, last=None),
            holds("C", None, generation=1, images=(image(ONE, 1, 2),)),
        ),
        "AC", ONE, "AC", newest=LATER, lost="rank 2 owned 50 % of the state, and no other rank holds it",
        image=image(ONE, 0).plan,
    ),
    "the one that has read the image owns all: the others are given the state": Story(
        (
            owner("A", ONE, 8, image(ONE, 0), generation=1, last=None),
            holds("C", None, generation=1, images=(image(ONE, 1, 2),)),
        ),
        "AC", ONE, "C", newest=LATER,
    ),
    "an image of an older generation is of a course that was given up, however far it got": Story(
        (
            owner("A", TWO_LATER, 4, image(THREE, 0, 1, 2), image(TWO_LATER, 0, generation=1, of=2), generation=1),
            holds("C", None, generation=1, images=(image(TWO_LATER, 1, generation=1, of=2),)),
        ),
        "AC", TWO_LATER, "AC", newest=Record(1, ("A", "C"), lineage(ONE)), image=image(TWO_LATER, 0, generation=1).plan,
        lost="rank 2 owned 50 % of the state, and no other rank holds it",
    ),
    "a member that never began has an image of a course that was given up": Story(
        (
            owner("A", TWO_LATER, 4, image(ONE, 0), generation=2),
            owner("C", TWO_LATER, 2, image(ONE, 1, 2), generation=2),
            holds("D", None, generation=2, images=(image(THREE, 0, 1, 2),)),
        ),
        "ACD", ONE, "ACD", image=image(ONE, 0).plan,
        lost="ranks 1 and 3 owned 25 % of the state, and no other rank holds it",
        newest=Record(2, ("A", "B", "C", "D"), lineage(TWO_LATER), fresh=frozenset("D")),
    ),
    "if all that began are dead, what is left of any course is read": Story(
        (holds("D", None, generation=2, images=(image(THREE, 0, 1, 2),)),), "D", THREE, "D",
        image=image(THREE, 0).plan, newest=Record(2, ("A", "D"), lineage(TWO_LATER), fresh=frozenset("D")),
        lost="all ranks that held the state are gone",
    ),
    "parts of two images are never put together, though they are of one step": Story(
        (
            owner("A", THREE, 5, image(ONE, 0), image(TWO, 0), generation=1),
            owner("C", THREE, 1, image(ONE, 1, 2), image(TWO_LATER, 1, 2, generation=1), generation=1),
        ),
        "AC", ONE, "AC", newest=Record(1, ("A", "B", "C"), lineage(ONE)), image=image(ONE, 0).plan, lost=ONE_IS_LOST,
    ),
    "a part at two places is one part": Story(
        (owner("A", THREE, 5, image(TWO, 0, 2)), owner("C", THREE, 1, image(TWO, 0, 2))),
        "AC", None, "AC", lost=ONE_IS_LOST,
    ),
    "what a worker has that is left out does not count": Story(
        (
            owner("A", THREE, 5, image(TWO, 0), generation=1), owner("C", THREE, 1, image(TWO, 2), generation=1),
            owner("B", THREE, 2, image(TWO, 0, 1, 2)),
        ),
        "AC", None, "AC", lost=ONE_IS_LOST, newest=Record(1, ("A", "B", "C"), lineage(ONE)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STORIES)
def test_without_the_whole_state_a_generation_begins_with_the_newest_image_that_is_whole(name: str) -> None:
    assert STORIES[name].tell(decide) == STORIES[name].expected()


# JSON.

FULL = Report("3.1", 4, Lineage(7, 5), part=(3, 8), images=(image(TWO, 0, 2), image(ONE, 1)), saved=6)
RECORD = Record(5, ("3.1", "0.2"), Lineage(6, 4), fresh=frozenset({"3.1", "0.2"}), lost="rank 1", image="5e0f")


def test_images_come_out_of_json_as_they_went_in() -> None:
    assert Report.from_record(json.loads(json.dumps(FULL.to_record()))) == FULL
    assert Record.from_record(json.loads(json.dumps(RECORD.to_record()))) == RECORD


def test_what_a_version_without_images_has_written_is_read() -> None:
    report = {key: value for key, value in FULL.to_record().items() if key not in ("images", "saved")}
    assert Report.from_record(report) == replace(FULL, images=(), saved=0)
    record = {key: value for key, value in RECORD.to_record().items() if key != "image"}
    assert Record.from_record(record) == replace(RECORD, image="")


def test_parts_are_in_order_whatever_order_they_come_in() -> None:
    assert Image.from_record({**asdict(image(TWO, 0, 2)), "parts": [2, 0]}) == image(TWO, 0, 2)


@pytest.mark.parametrize(
    "change",
    [{"parts": parts} for parts in (None, 5, [], [3], [-1, 0], [0.5], ["x"], [None], [[0]], [float("inf")])]
    + [{"number_of_parts": number} for number in (None, "x", 0, 2, -3, 2.5, [])]
    + [{"lineage": of} for of in (None, 5, {}, {"step": 1}, {"step": 1, "chain": 2**63})]
    + [{"generation": generation} for generation in (None, "x", 0.5, [])]
    + [{"plan": ""}],
    ids=str,
)
def test_what_is_no_image_is_refused_with_an_error_that_the_hub_expects(change: dict[str, Any]) -> None:
    whole = asdict(image(TWO, 0, 2))
    with pytest.raises((KeyError, TypeError, ValueError)):
        Report.from_record({**FULL.to_record(), "images": [{**whole, **change}]})
    with pytest.raises(KeyError):
        Report.from_record({**FULL.to_record(), "images": [{k: v for k, v in whole.items() if k not in change}]})


@pytest.mark.parametrize(
    "change", [{"images": of} for of in (None, 5, [5], ["x"], [None])] + [{"saved": of} for of in (None, "x", 0.5, [])]
)
def test_what_are_no_images_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        Report.from_record({**FULL.to_record(), **change})


# A rule of `decide` less.


def _with_reports(change: Callable[[Report], Report]) -> Rule:
    def rule(newest: Record, reports: Mapping[str, Report], *rest: Any, **options: Any) -> Record:
        return decide(newest, {name: change(one) for name, one in reports.items()}, *rest, **options)

    return rule


def _with_images(change: Callable[[Image], Image]) -> Rule:
    return _with_reports(lambda report: replace(report, images=tuple(map(change, report.images))))


def without_a_live_state(newest: Record, reports: Mapping[str, Report], *rest: Any, **options: Any) -> Record:
    """After a loss all read the image, though the members hold the state."""
    record = decide(newest, reports, *rest, **options)
    images = membership._whole_images(list(reports.values()))
    if set(newest.roster) <= reports.keys() or not images:
        return record
    back = max(images, key=lambda one: one.order)
    return replace(record, base=back.lineage, image=back.plan, last=None, fresh=frozenset(record.roster), lost="some")


def without_the_newest(newest: Record, reports: Mapping[str, Report], *rest: Any, **options: Any) -> Record:
    """The oldest image is read."""
    record = decide(newest, reports, *rest, **options)
    images = membership._whole_images(list(reports.values()))
    back = min(images, key=lambda one: one.order, default=None)
    return replace(record, base=back.lineage, image=back.plan) if back and record.image else record


def without_fresh_readers(newest: Record, *rest: Any, **options: Any) -> Record:
    """A member that holds a state keeps it, though the others read an image."""
    record = decide(newest, *rest, **options)
    return replace(record, fresh=frozenset({*record.roster} - {*newest.roster})) if record.image else record


def without_the_holders(newest: Record, *rest: Any, **options: Any) -> Record:
    """An image is read whoever has it, though no member that holds a state knows it."""
    return decide(replace(newest, base=None), *rest, **options)


without_all_parts = _with_images(lambda one: replace(one, number_of_parts=len(one.parts)))
without_images = _with_reports(lambda report: replace(report, images=()))
without_the_disk = _with_reports(lambda report: replace(report, saved=0))
without_memory_before_disk = _with_reports(lambda report: replace(report, saved=report.saved + 1))
without_the_generation = _with_images(lambda one: replace(one, generation=0))


def without_the_plan(newest: Record, reports: Mapping[str, Report], *rest: Any, **options: Any) -> Record:
    """Parts of one step are parts of one image, whichever course and cut they are of."""
    plans: dict[int, str] = {}
    for report in reports.values():
        plans.update({one.lineage.step: one.plan for one in report.images if one.lineage.step not in plans})
    return _with_images(lambda one: replace(one, plan=plans[one.lineage.step]))(newest, reports, *rest, **options)


MUTANTS = {
    "the live state comes first": without_a_live_state,
    "an image needs all parts": without_all_parts,
    "the newest image is read": without_the_newest,
    "all members read it": without_fresh_readers,
    "images are read": without_images,
    "a newer checkpoint comes first": without_the_disk,
    "memory comes before a checkpoint of the same step": without_memory_before_disk,
    "images come in the order of generations, then of steps": without_the_generation,
    "an image of the course of the members is read": without_the_holders,
    "a plan says which parts are of one image": without_the_plan,
}


@pytest.mark.parametrize("rule", MUTANTS)
def test_without_one_of_its_rules_some_story_ends_otherwise(rule: str) -> None:
    assert all(story.is_told_by(decide) for story in STORIES.values())
    assert not all(story.is_told_by(MUTANTS[rule]) for story in STORIES.values())


# What the search finds.


NIGHTLY = [pytest.mark.nightly, pytest.mark.timeout(3600)]


@pytest.mark.parametrize(
    ("workers", "steps", "budget", "options", "least"),
    [
        (2, 3, Budget(faults=1), {"has_stops": False}, 2000),
        (3, 2, Budget(faults=1), {"has_stops": False}, 7000),
        (2, 2, Budget(faults=2), {"has_stops": False}, 2500),
        (2, 2, Budget(faults=1, restarts=1), {"has_stops": False}, 2500),
        pytest.param(2, 2, Budget(faults=1), {}, 6000, marks=pytest.mark.slow),
        pytest.param(2, 3, Budget(faults=2, restarts=1), {"has_stops": False}, 50_000, marks=pytest.mark.nightly),
        pytest.param(3, 2, Budget(faults=2), {"has_stops": False}, 30_000, marks=pytest.mark.slow),
        # gradients on their way too, and no move made at once
        pytest.param(3, 1, Budget(faults=1), {"is_reduced": False, "has_stops": False}, 6000, marks=pytest.mark.slow),
        pytest.param(2, 2, Budget(faults=1), {"is_reduced": False}, 30_000, marks=NIGHTLY),
        pytest.param(3, 2, Budget(faults=1), {}, 90_000, marks=NIGHTLY),
        pytest.param(3, 3, Budget(faults=2), {"has_stops": False}, 100_000, marks=NIGHTLY),
        pytest.param(3, 2, Budget(faults=2, restarts=1), {"has_stops": False}, 400_000, marks=NIGHTLY),
        pytest.param(2, 4, Budget(faults=2, restarts=2), {"has_stops": False}, 300_000, marks=NIGHTLY),
        # ten minutes, and 3 GB
        pytest.param(3, 2, Budget(faults=2), {}, 3_000_000, marks=NIGHTLY),
    ],
)
def test_an_image_at_two_places_outlives_every_single_death(
    workers: int, steps: int, budget: Budget, options: dict[str, Any], least: int
) -> None:
    """`ImageSearch` sees that a record names it, that it can be read, and that no move gives it up for less."""
    told = set[str]()
    search = ImageSearch(workers=workers, steps=steps, budget=budget, **options)
    assert search.exhaust(lambda move: told.add(move.told.partition(" ")[2])) > least
    assert {"dies", "loads the checkpoint", "reads the image", "has its part in memory"} <= told
    if workers > 2 and budget.faults > 1:  # of two, the one that is left reads it alone
        assert {"freezes while forming", "freezes while handed"} <= told


@pytest.mark.parametrize(("workers", "every", "steps"), [(2, 1, 3), (3, 1, 3), (2, 2, 4), (3, 2, 4)])
def test_a_death_costs_at_most_the_steps_of_one_interval_and_the_one_under_way(
    workers: int, every: int, steps: int
) -> None:
    """If images are in their places before the next step ends."""
    search = ImageSearch(
        workers=workers, steps=steps, every=every, is_prompt=True, has_stops=False, budget=Budget(faults=1)
    )
    search.exhaust()
    assert search.most_again == every, "and the step that had no end was never made"


@pytest.mark.parametrize("walks", [60, pytest.param(3000, marks=pytest.mark.nightly)])
def test_long_histories_with_images_end_with_every_step_made_once(walks: int) -> None:
    told = collections.Counter[str]()
    for seed in range(walks):
        budget = Budget(faults=4, restarts=3, non_finite=1, redo=1)
        search = ImageSearch(workers=2 + seed % 3, steps=4, budget=budget)
        told.update(event.partition(" ")[2] for event in search.wander(random.Random(seed)))
    words = ("dies", "is stopped", "wakes", "reads the image", "is started again on its node", "drops its old part")
    assert [word for word in words if told[word] < walks / 10] == []


def joining(**options: Any) -> ImageSearch:
    """Two members, and a third worker that is started some time."""
    search = ImageSearch(workers=2, budget=Budget(faults=0, restarts=1), **options)
    new = Worker("2.0", status="dead", generation=-1, history=None)
    search.first = search.first._replace(workers=(*search.first.workers, new))
    return search


@pytest.mark.slow
def test_a_worker_that_joins_costs_no_image() -> None:
    """Its wish may freeze the members between two images: the newer one is whole, and the older one at two places."""
    assert joining(steps=4).exhaust() > 10_000
    with pytest.raises(Broken, match="drops its old part: an image that was whole at two places is gone"):
        joining(steps=4, without=[TWICE]).exhaust()


def by_step(plan: Plan) -> str:
    """As if neither the course nor the cut were part of what identifies an image."""
    return f"step {len(plan.history)}"


def by_history(plan: Plan) -> str:
    """As if the cut were no part of it."""
    return f"{plan.history}"


@pytest.mark.parametrize(
    ("workers", "steps", "budget", "options", "what"),
    [
        (2, 3, Budget(faults=1), {"without": [ANSWER]}, "is gone"),
        (2, 3, Budget(faults=1), {"without": [ALL_SEALED]}, "is gone"),
        (2, 2, Budget(faults=1), {"without": [KEPT], "has_stops": True}, "is gone"),
        pytest.param(
            2, 3, Budget(faults=2, restarts=1), {"without": [FREED]}, "given up comes back", marks=pytest.mark.slow
        ),
        pytest.param(
            2, 3, Budget(faults=2, restarts=1), {"without": [KNOWN]}, "given up comes back", marks=pytest.mark.slow
        ),
        (2, 2, Budget(faults=1), {"without": [TWICE], "has_stops": True}, "is gone"),
        (3, 2, Budget(faults=1), {"rule": without_a_live_state}, "is forgotten"),
        (2, 2, Budget(faults=1), {"rule": without_all_parts}, "is in no memory"),
        (2, 2, Budget(faults=1), {"rule": without_the_newest}, "an older image is read"),
        (2, 2, Budget(faults=1), {"rule": without_fresh_readers}, "gone on in an old one"),
        (2, 2, Budget(faults=1), {"rule": without_images}, "is not read"),
        pytest.param(
            3, 2, Budget(faults=2, restarts=1), {"rule": without_the_holders}, "given up comes back", marks=NIGHTLY
        ),
        pytest.param(
            2, 3, Budget(faults=2, restarts=2), {"named": by_step}, "parts of different", marks=pytest.mark.slow
        ),
    ],
)
def test_without_one_of_the_rules_of_images_a_history_goes_wrong(
    workers: int, steps: int, budget: Budget, options: dict[str, Any], what: str
) -> None:
    search = ImageSearch(workers=workers, steps=steps, budget=budget, **{"has_stops": False, **options})
    with pytest.raises(Broken, match=what):
        search.exhaust()


@pytest.mark.parametrize(
    ("workers", "steps", "budget"),
    [
        (3, 2, Budget(faults=1)),
        pytest.param(2, 3, Budget(faults=2, restarts=1), marks=pytest.mark.slow),
        pytest.param(2, 4, Budget(faults=2, restarts=2), marks=NIGHTLY),
    ],
)
@pytest.mark.parametrize("options", [{"named": by_history}, {"rule": without_the_generation}], ids=["cut", "order"])
def test_two_rules_only_repeat_what_others_say(
    options: dict[str, Any], workers: int, steps: int, budget: Budget
) -> None:
    """A lineage names the generation that made its last update, so also the cut of an image of it. And once images of
    other courses are freed, the newest one by generation is the newest one by step. Both rules stay: the first costs
    nothing, and without the second one `decide` would rely on what a worker has freed (there is a story).
    """
    search = ImageSearch(workers=workers, steps=steps, budget=budget, has_stops=False, **options)
    assert search.exhaust() > 7000
