"""One registry of what is kept for a process group, and its close."""

from unittest import mock

import pytest
import torch.distributed as dist

from megatron_fluid.comm import groups
from megatron_fluid.comm.groups import close_group, group_resource, is_destroyed


@pytest.fixture(autouse=True)
def empty_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "_resources", {})
    monkeypatch.setattr(groups, "is_destroyed", lambda group: group.destroyed)


def _group() -> mock.Mock:
    return mock.Mock(destroyed=False)


def test_a_resource_is_made_once_for_a_group_and_key() -> None:
    first, second = _group(), _group()
    made = [group_resource(group, key, object) for group in (first, second) for key in "ab"]
    assert len(set(map(id, made))) == 4
    assert group_resource(first, "a", object) is made[0]


def test_none_is_remembered_like_any_other_value() -> None:
    group, make = _group(), mock.Mock(return_value=None)
    for _ in range(2):
        assert group_resource(group, "reason", make) is None
    make.assert_called_once_with()


def test_closing_a_group_closes_latest_first_and_once() -> None:
    group, closed = _group(), []
    for name in "abc":
        group_resource(group, name, lambda name=name: name, closed.append if name != "b" else None)
    for _ in range(2):
        close_group(group)
    assert closed == ["c", "a"]
    assert group not in groups._resources


def test_what_destroyed_groups_kept_goes_when_the_next_group_asks() -> None:
    kept, gone, new = (_group() for _ in range(3))
    for group in (kept, gone):
        group_resource(group, "x", object)
    gone.destroyed = True
    group_resource(new, "x", object)
    assert list(groups._resources) == [kept, new]


def test_a_group_is_known_to_be_destroyed() -> None:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    group = dist.new_group([0])
    assert not is_destroyed(group)
    dist.destroy_process_group(group)
    assert is_destroyed(group)
    dist.destroy_process_group()
