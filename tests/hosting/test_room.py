"""Which idle models are unloaded for another one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.engines.plans import machine

from bedplate.hosting.memory import LoadedModel, MemoryLimits, choose_unloads

sizes = st.integers(1, 40)
needs = st.fixed_dictionaries({"host": sizes}, optional={"card 0": sizes})
holders = st.lists(
    st.tuples(needs, st.integers(0, 50), st.booleans()).map(
        lambda parts: LoadedModel(name="", need=parts[0], last_used=float(parts[1]), may_go=parts[2])
    ),
    max_size=6,
).map(lambda found: [LoadedModel(str(n), one.need, one.last_used, one.may_go) for n, one in enumerate(found)])
rooms = st.builds(
    MemoryLimits, st.fixed_dictionaries({"host": st.integers(1, 120), "card 0": st.integers(1, 120)}), st.none() | sizes
)


@given(rooms, holders, needs)
def test_unloads_fit_and_are_minimal(room: MemoryLimits, loaded: list[LoadedModel], need: dict[str, int]) -> None:
    going = choose_unloads(room, loaded, need)
    fixed = [one.need for one in loaded if not one.may_go]
    assert (going is None) == (not room.holds([need, *fixed]))
    if going is not None:
        assert all(one.may_go for one in loaded if one.name in going)
        stay = [one for one in loaded if one.name not in going]
        assert room.holds([need, *(one.need for one in stay)])
        for name in going:
            kept = next(one for one in loaded if one.name == name)
            assert not room.holds([need, kept.need, *(one.need for one in stay)]), "this unload was not needed"


def test_least_recently_used_of_equal_models_is_unloaded() -> None:
    room = MemoryLimits({"host": 30})
    loaded = [LoadedModel(name, {"host": 10}, used, True) for name, used in (("a", 3.0), ("b", 1.0), ("c", 2.0))]
    assert choose_unloads(room, loaded, {"host": 10}) == ("b",)
    assert choose_unloads(room, loaded, {"host": 20}) == ("b", "c")
    assert choose_unloads(room, loaded, {"host": 31}) is None


def test_limits_are_free_memory_minus_reserve_and_budget_is_total() -> None:
    room = MemoryLimits.from_hardware(machine("H100 SXM", 2), 100)
    assert set(room.devices) == {"host", "card 0", "card 1"}
    assert room.holds([{"host": 60, "card 0": 40}]) and not room.holds([{"host": 60, "card 0": 41}])
    assert "budget" in room.describe() and "card 1" in MemoryLimits.from_hardware(machine("H100 SXM", 2)).describe()
