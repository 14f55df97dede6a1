"""The patch engine, on a small package made for each test."""

import functools
import importlib
import os
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_fluid.errors import ConfigError, PatchError
from megatron_fluid.patches.engine.engine import Engine
from megatron_fluid.patches.engine.patch import Patch

# A small package that stands for Megatron.
MODULES = {
    "__init__": "",
    "layers": """
        class Base:
            def inherited(self, x):
                return ("inherited", x)

        class Layer(Base):
            def __init__(self, size):
                self.size = size

            def forward(self, x, *, scale=1):
                return self.size * x * scale

            @staticmethod
            def static(x):
                return x

            @classmethod
            def klass(cls, x):
                return (cls.__name__, x)
    """,
    "functions": """
        def double(x):
            return 2 * x
    """,
    "replacements": """
        def negated(original):
            return lambda *args, **kwargs: -original(*args, **kwargs)
    """,
}


@pytest.fixture
def fakemega(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports a module of the package `fakemega` by name; the package is forgotten at the end."""
    (tmp_path / "fakemega").mkdir()
    for name, text in MODULES.items():
        (tmp_path / "fakemega" / f"{name}.py").write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield lambda name: importlib.import_module(f"fakemega.{name}")
    for name in [name for name in sys.modules if name.partition(".")[0] == "fakemega"]:
        del sys.modules[name]
    # wrapt fires once a module name
    importlib.import_module("wrapt.importer")._post_import_hooks.clear()


def negate(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def negated(*args: Any, **kwargs: Any) -> Any:
        return -original(*args, **kwargs)

    return negated


def tag(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: ("patched", original(*args))


FORWARD = Patch(
    "forward", "fakemega.layers:Layer.forward", negate, "test", signature="(self, x, *, scale=1)"
)
DOUBLE = Patch("double", "fakemega.functions:double", negate, "test", signature="(x)")


def engine(*patches: Patch, version: str = "0.19.2", **options: Any) -> Engine:
    options.setdefault("help_version", "Override it with --allow.")
    options.setdefault("help_disable", "Leave it out with --disable {name}.")
    return Engine(patches, version=lambda: version, supported="0.19.*", **options)


def states(made: Engine) -> dict[str, str]:
    return {row.patch: row.state for row in made.report()}


def effects(fakemega: Any) -> tuple[int, int]:
    """What the two functions give that FORWARD and DOUBLE negate."""
    return fakemega("functions").double(1), fakemega("layers").Layer(1).forward(1)


PLAIN, PATCHED = (2, 1), (-2, -1)


@pytest.mark.parametrize("replacement", [negate, "fakemega.replacements:negated"])
def test_arming_imports_nothing_and_patches_after_the_import(
    fakemega: Any, replacement: Any
) -> None:
    made = engine(Patch("double", DOUBLE.target, replacement, "test"))
    made.arm()
    assert not any(name.startswith("fakemega") for name in sys.modules)
    assert states(made) == {"double": "armed"}
    assert fakemega("functions").double(2) == -4
    assert states(made) == {"double": "applied"}


def test_revert_gives_back_the_very_objects(fakemega: Any) -> None:
    layer_class = fakemega("layers").Layer
    kinds = {
        name: Patch(name, f"fakemega.layers:Layer.{name}", tag, "test")
        for name in ("inherited", "static", "klass", "forward")
    }
    before = dict(vars(layer_class))
    made = engine(*kinds.values())
    made.apply()
    layer = layer_class(1)
    assert layer.inherited(5) == ("patched", ("inherited", 5))
    assert layer.static(5) == layer_class.static(5) == ("patched", 5)
    assert layer.klass(5) == ("patched", ("Layer", 5))
    made.revert()
    made.revert()
    assert dict(vars(layer_class)) == before
    assert all(vars(layer_class)[name] is value for name, value in before.items())
    assert "inherited" not in vars(layer_class)
    assert set(states(made).values()) == {"reverted"}


def test_only_objects_that_can_be_called_are_replaced_where_held_by_value(fakemega: Any) -> None:
    functions, holder = fakemega("functions"), fakemega("layers")
    functions.SWITCH = holder.UNRELATED = False
    made = engine(Patch("switch", "fakemega.functions:SWITCH", lambda original: True, "test"))
    made.apply()
    assert functions.SWITCH is True
    assert holder.UNRELATED is False
    made.revert()
    assert functions.SWITCH is False


def test_what_is_missing_is_added_where_the_patch_says_so_and_taken_away_again(
    fakemega: Any,
) -> None:
    given: list[object] = []

    def triple(original: object) -> Callable[[int], int]:
        given.append(original)
        return lambda x: 3 * x

    functions = fakemega("functions")
    made = engine(Patch("triple", "fakemega.functions:triple", triple, "test", adds=True))
    made.apply()
    assert functions.triple(2) == 6 and given == [None]
    made.revert()
    assert not hasattr(functions, "triple")
    with pytest.raises(PatchError, match="expected it to exist, found nothing"):
        engine(Patch("triple", "fakemega.functions:triple", triple, "test")).apply()


def test_a_wrong_signature_changes_nothing_and_says_everything(fakemega: Any) -> None:
    target, expected = "fakemega.layers:Layer.klass", "(cls, x, group)"
    made = engine(DOUBLE, FORWARD, Patch("wrong", target, tag, "test", signature=expected))
    with pytest.raises(PatchError) as caught:
        made.apply()
    for part in ("'wrong'", target, expected, "(cls, x)", "0.19.2", "--disable wrong"):
        assert part in str(caught.value)
    assert effects(fakemega) == PLAIN
    assert set(states(made).values()) == {"off"}


def test_a_patch_under_a_condition_that_does_not_hold_is_neither_checked_nor_applied(
    fakemega: Any,
) -> None:
    wrong = Patch(
        "wrong", FORWARD.target, negate, "test", signature="(self, x)",
        when=lambda: False, condition="on a CPU",
    )  # fmt: skip
    made = engine(DOUBLE, wrong)
    made.arm()
    assert effects(fakemega) == (-2, 1)
    found = {row.patch: (row.state, row.reason) for row in made.report()}
    assert found["wrong"] == ("not needed", "only on a CPU")


def broken(original: object) -> object:
    raise RuntimeError("no such kernel")


@pytest.mark.parametrize(("attribute", "factory", "error", "said"), [
    ("gone", tag, PatchError, "'late' does not fit fakemega.layers:Layer.gone"),
    ("klass", broken, RuntimeError, "no such kernel"),
])  # fmt: skip
def test_an_error_at_a_later_import_takes_back_what_was_applied_before(
    fakemega: Any, attribute: str, factory: Any, error: type[Exception], said: str
) -> None:
    made = engine(DOUBLE, Patch("late", f"fakemega.layers:Layer.{attribute}", factory, "test"))
    made.arm()
    assert fakemega("functions").double(1) == -2
    with pytest.raises(error, match=said):
        fakemega("layers")
    assert effects(fakemega) == PLAIN  # the program may go on, unpatched
    assert set(states(made).values()) == {"off"}


def test_a_patch_that_does_not_fit_is_left_out_with_those_that_need_it(fakemega: Any) -> None:
    """Also where it is found only when its module is imported, after others were applied."""
    missing = Patch("missing", "fakemega.layers:Layer.gone", tag, "test")
    needs = Patch("needs", "fakemega.functions:double", negate, "test", requires=("missing",))
    also = Patch("also", "fakemega.layers:Layer.klass", tag, "test", requires=("needs",))
    made = engine(needs, FORWARD, missing, also, strict=lambda: False)
    made.arm()
    functions = fakemega("functions")
    assert functions.double(1) == -2
    with pytest.warns(UserWarning, match="missing is left out: .* does not fit fakemega.layers"):
        layer = fakemega("layers").Layer(1)
    assert functions.double(1) == 2
    assert layer.forward(1) == -1
    found = {row.patch: (row.state, row.reason) for row in made.report()}
    assert found["forward"][0] == "applied"
    assert found["needs"] == ("misfit", "it needs missing, which is left out")
    assert found["also"] == ("misfit", "it needs needs, which is left out")
    assert made.off_reason("missing") is not None
    made.revert()
    assert layer.forward(1) == 1


def test_an_unsupported_version_is_refused_by_name_and_may_be_overridden(fakemega: Any) -> None:
    made = engine(DOUBLE, version="0.20.0")
    with pytest.raises(PatchError, match=r"0\.20\.0 found.*Override it with --allow"):
        made.apply()
    assert fakemega("functions").double(1) == 2
    engine(DOUBLE, version="0.20.0", allow_unsupported=lambda: True).apply()
    assert fakemega("functions").double(1) == -2


def test_every_release_of_the_supported_series_and_no_other_is_accepted() -> None:
    for version in ("0.19.0", "0.19.0rc1", "0.19.7", "0.19.2+local"):
        assert engine(version=version).version_problem() is None
    for version in ("0.18.9", "0.20.0rc1", "1.0", "0.190.0"):
        assert version in (engine(version=version).version_problem() or "")


def test_a_trigger_delays_a_patch_to_another_module(fakemega: Any) -> None:
    functions = fakemega("functions")
    made = engine(
        Patch("late", "fakemega.functions:double", negate, "test", trigger="fakemega.layers")
    )
    made.arm()
    assert functions.double(1) == 2
    fakemega("layers")
    assert functions.double(1) == -2


@pytest.mark.parametrize("start", ["arm", "apply"])
def test_patches_that_the_user_turns_off(fakemega: Any, start: str) -> None:
    made = engine(DOUBLE, FORWARD, disabled=lambda: ["double"])
    getattr(made, start)()
    assert effects(fakemega) == (2, -1)
    assert states(made) == {"double": "off", "forward": "applied"}
    made.disable("forward")
    made.apply()
    assert effects(fakemega) == PLAIN
    with pytest.raises(ConfigError, match="found 'nonsense', allowed: double, forward"):
        made.disable("nonsense")


@pytest.mark.parametrize("start", ["arm", "apply"])
def test_switched_off_leaves_everything_alone(fakemega: Any, start: str) -> None:
    made = engine(DOUBLE, switched_off=lambda: "MEGATRON_FLUID=off")
    getattr(made, start)()
    assert fakemega("functions").double(1) == 2
    assert [(row.state, row.reason) for row in made.report()] == [("off", "MEGATRON_FLUID=off")]


def test_somebody_elses_later_replacement_is_left_alone_and_reported(fakemega: Any) -> None:
    made = engine(DOUBLE, FORWARD)
    made.apply()
    functions, theirs = fakemega("functions"), len
    functions.double = theirs
    with pytest.raises(PatchError, match="fakemega.functions:double"):
        made.revert()
    assert functions.double is theirs
    assert fakemega("layers").Layer(1).forward(1) == 1


def test_nothing_is_patched_after_revert_until_armed_again(fakemega: Any) -> None:
    made = engine(DOUBLE, FORWARD)
    made.arm()
    made.revert()
    assert fakemega("functions").double(1) == 2
    made.arm()
    assert effects(fakemega) == PATCHED


def test_the_context_manager_restores_what_was_before(fakemega: Any) -> None:
    made = engine(DOUBLE, FORWARD)
    with made.patched("double"):
        assert effects(fakemega) == (-2, 1)
        with made.patched():
            assert effects(fakemega) == PATCHED
        assert effects(fakemega) == (-2, 1)
    with pytest.raises(ZeroDivisionError), made.patched():
        fakemega("functions").double(1 / 0)
    assert effects(fakemega) == PLAIN
    assert states(made) == {"double": "reverted", "forward": "reverted"}


def test_a_module_that_cannot_be_imported_is_an_error_of_the_patch() -> None:
    made = engine(Patch("absent", "no_such_package.module:thing", negate, "test"))
    with pytest.raises(PatchError, match="no_such_package.module for the patch 'absent'"):
        made.apply()


@pytest.mark.parametrize(("name", "target"), [("double", "other:thing"), ("other", DOUBLE.target)])
def test_names_and_targets_are_unique(name: str, target: str) -> None:
    with pytest.raises(ValueError, match="more than one with the"):
        engine(DOUBLE, Patch(name, target, negate, "test"))


@pytest.mark.process
@pytest.mark.parametrize("name", ["MEGATRON_FLUID", "MEGATRON_FLUID_DISABLE_PATCH"])
def test_a_variable_that_cannot_be_read_is_one_line_of_a_command_or_a_host(name: str) -> None:
    def ended(words: str, **more: str) -> tuple[int, list[str]]:
        root = str(Path(__file__).resolve().parents[3])
        environment = {**os.environ, "PYTHONPATH": root, name: "maybe", **more}
        command = [sys.executable, *shlex.split(words)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        return done.returncode, done.stderr.splitlines()

    said, imports = f"{name}: found 'maybe', allowed", "-c 'import megatron_fluid'"
    for words, more in (("-m megatron_fluid.cli patches", {}), (imports, {"RANK": "2"})):
        status, (line,) = ended(words, **more)
        assert status == 2 and line.startswith(f"megatron_fluid: {said}")
    assert ended(imports, RANK="1", LOCAL_RANK="1") == (2, [])
    status, lines = ended(imports)
    assert status == 1 and f"ConfigError: {said}" in lines[-1]
