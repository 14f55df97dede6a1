"""One folder for everything that a training run leaves behind, and the rule that no run overwrites
another.

::

    runs/pretrain_gpt_moe/
        run.json        the command, the machine and the versions of each start
        run.lock        held by the run that saves here
        data.json       what was trained on
        checkpoints/    Megatron's
        tensorboard/    Megatron's
        log.txt         Megatron's full log (log-<rank>.txt for other ranks)
        losses.json     loss of every iteration and evaluation, over all starts
        losses.png      the same as a picture

With ``--save FOLDER`` the run folder is FOLDER and its checkpoints lie directly in it. A FOLDER
named "checkpoints" lies in its run, as above.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import shlex
import socket
import sys
import time
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pretrain_defaults import run_folder_of
from run_record import RunResult
from text_dataset import TextDataset

__all__ = ["RunFolder", "saved_iteration"]

_TRACKER = "latest_checkpointed_iteration.txt"


def saved_iteration(folder: str | os.PathLike[str] | None) -> str | None:
    """What Megatron's tracker file in ``folder`` names as the last checkpoint; None where there is
    none."""
    if folder is None:
        return None
    tracker = Path(folder, _TRACKER)
    if not tracker.is_file():
        return None
    return tracker.read_text(encoding="utf-8", errors="replace").strip()


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run: ``path``, where its checkpoints go (None: nowhere), and the iteration
    that it resumes from (None: it starts)."""

    path: Path
    save: str | None
    resumed: str | None

    @classmethod
    def choose(
        cls, given: Mapping[str, Any], run: str, save: str | None, resume: bool
    ) -> RunFolder:
        """Decide whether this run starts or resumes, create its folder, write to it once and, on
        rank 0 of a run that saves, lock it.

        Args:
            given: the parsed arguments, by destination.
            run: the folder of the run.
            save: the folder of the checkpoints, None to write none.
            resume: ``--resume``: train on from the last checkpoint in ``save``, if there is one.

        Raises:
            ValueError: the folder cannot be written, another run writes there, it holds a run that
                this one would set back, or there is nothing to load.
        """
        if save == "":  # Megatron would write no checkpoint
            raise ValueError("--save: found '', allowed: a folder; --no-defaults save writes none")
        path = Path(run)
        load = given.get("load")
        same = load is not None and save is not None and _same(load, save)
        # A job that is restarted by the same command names one folder for --load and --save.
        alone = not (same and any(word.split("=")[0] == "--save" for word in sys.argv))
        if load is not None and alone and saved_iteration(load) is None:
            raise ValueError(
                f"--load: found no checkpoint in {load}; leave it out to train from scratch"
            )
        if resume and load is not None and not same:
            raise ValueError(
                f"--resume: found --load {load} as well; --resume loads from the run's own "
                f"folder {save}: give one of them"
            )
        if resume and save is None and load is None:
            raise ValueError(
                "--resume: found no --save; give that of the run to go on with, or --load FOLDER "
                "in place of --resume"
            )
        for place in {path, Path(save) if save else path}:
            _try_to_write(place)
        # Runs that save nothing overwrite nothing: several evaluate, also while another trains.
        if save is not None and not given.get("skip_train") and os.environ.get("RANK", "0") == "0":
            _lock(path)
        found = saved_iteration(save)
        last = _last_checkpoint(save) if save is not None and found is None else None
        if last is not None or (found is not None and not _names_a_checkpoint(save, found)):
            what = f"no file beside {last}" if found is None else repr(found)
            raise ValueError(
                f"{Path(save or '', _TRACKER)}: found {what}, allowed: the number of a complete "
                "iter_ folder beside it, or release; write the last one into it and give --resume, "
                "or name another folder with --save"
            )
        if found is not None:
            if not (resume or same):
                raise ValueError(
                    f"{save} holds a run (its last checkpoint: {found}), which this one would "
                    "overwrite; --resume trains on from it, --save OTHER_FOLDER starts another run"
                )
            if given.get("finetune"):
                raise ValueError(
                    f"--finetune: {save} goes on to {found}, and training from iteration 0 would "
                    "overwrite it; leave --finetune out, or name another folder with --save"
                )
            step = given.get("ckpt_step")
            if step is not None and str(step) != found:
                raise ValueError(
                    f"--ckpt-step {step}: {save} goes on to {found}, and saving into it would set "
                    "it back; name another folder with --save"
                )
        return cls(path, save, found if resume or same else None)

    def begin(self, args: Any, text: TextDataset | None) -> None:
        """Write what runs and on which data; called by rank 0.

        Raises:
            ValueError: a file of the run is damaged, or Megatron cannot load the optimizer.
        """
        _refuse_other_experts(args)
        starts = _read(self.path / "run.json", [])
        _read(self.path / "losses.json", {})  # damaged, it would end the run's last minute
        starts.append(
            {
                "began": time.strftime("%Y-%m-%d %H:%M:%S %z"),
                "command": shlex.join(sys.argv),
                "host": socket.gethostname(),
                "ranks": args.world_size,
                "resumed_from": self.resumed,
                "python": platform.python_version(),
                "versions": _versions(),
                "parallel": {
                    name: getattr(args, f"{name}_model_parallel_size")
                    for name in ("tensor", "pipeline", "expert")
                }
                | {"context": args.context_parallel_size, "data": args.data_parallel_size},
            }
        )
        _write(self.path / "run.json", starts)
        if text is not None:
            _write(self.path / "data.json", asdict(text))
        else:
            names = ("data_path", "data_args_path", "train_data_path", "valid_data_path", "split")
            found = {name: getattr(args, name, None) for name in (*names, "mock_data")}
            _write(self.path / "data.json", found)

    def end(self, result: RunResult) -> Path | None:
        """Add the losses of this start to those of earlier ones; called by rank 0.

        Returns:
            The picture of all of them, None where matplotlib is not installed or nothing was
            computed.
        """
        path = self.path / "losses.json"
        known: dict[str, dict[str, float]] = {"train": {}, "held_out": {}}
        if self.resumed is not None:
            known = _read(path, known)
        # Counted from 1, as in Megatron's log.
        known["train"] |= {
            str(iteration + 1): loss for iteration, loss in result.train_losses.items()
        }
        known["held_out"] |= {str(done.iteration): done.loss for done in result.evaluations}
        _write(path, known)
        title = f"{self.path}: {len(known['train'])} iterations"
        if result.step_s is not None:
            title += f", {1e3 * result.step_s:.0f} ms each"
        return _picture(known, self.path / "losses.png", title)


def _refuse_other_experts(args: Any) -> None:
    """Megatron loads no optimizer of experts on one rank for experts on several, nor the reverse:
    it ends in a KeyError. By default experts are on as many ranks as there are. Which start of a
    run saved last is not known: it is refused where none was like this one."""
    if not args.load or args.no_load_optim or args.finetune:
        return
    found = args.expert_model_parallel_size
    starts = _read(Path(run_folder_of(args.load, args.load), "run.json"), [])
    on_one = {start["parallel"]["expert"] == 1 for start in starts}
    if starts and (found == 1) not in on_one:
        raise ValueError(
            f"--expert-model-parallel-size: found {found}, allowed with the optimizer in "
            f"{args.load}: {'1' if True in on_one else 'more than 1'}; without it anything, by "
            "--no-load-optim --no-load-rng"
        )


def _names_a_checkpoint(folder: str | None, found: str) -> bool:
    """Whether what a tracker names is there; else Megatron leaves with status 0, or a traceback."""
    name = found if found == "release" else f"iter_{found:0>7}"
    known = found == "release" or (found.isascii() and found.isdigit())
    return known and Path(folder or "", name).is_dir()


def _last_checkpoint(folder: str) -> str | None:
    """The last checkpoint in ``folder``, by what Megatron's formats write when the rest is done."""
    done = [*Path(folder).glob("iter_*/.metadata"), *Path(folder).glob("iter_*/metadata.json")]
    for path in Path(folder).glob("iter_*/mp_rank_*/*.pt"):
        if zipfile.is_zipfile(path):  # else its write was cut off
            done.append(path.parent)
    return max((path.parent.name for path in done), default=None)


def _same(one: str, other: str) -> bool:
    return Path(one).resolve() == Path(other).resolve()


def _try_to_write(folder: Path) -> None:
    """Create ``folder`` and write a file in it: hours of training must not end in a folder that
    takes none."""
    trial = folder / f".write-test-{socket.gethostname()}-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trial.write_bytes(b"x" * 4096)
        trial.unlink()
    except OSError as error:
        raise ValueError(
            f"{folder}: this folder for the run cannot be written ({error.strerror}); name another "
            "with --save"
        ) from None


def _lock(folder: Path) -> None:
    """Hold ``folder`` until this process ends, however it ends: processes that it forked, which may
    live on for a moment, do not hold this kind of lock. Where the file system gives none there is
    none."""
    handle = os.open(folder / "run.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            return
        holder = os.read(handle, 300).decode(errors="replace") or "another run"
        raise ValueError(
            f"{folder}: found this folder in use by {holder}, allowed: one run at a time; wait for "
            "its end or stop it, or name another folder with --save"
        ) from None
    os.ftruncate(handle, 0)
    os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())


def _read(path: Path, otherwise: Any) -> Any:
    """The JSON of an earlier start; a ValueError where it is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return otherwise
    except ValueError:
        raise ValueError(f"{path} is damaged (no complete JSON): move it away") from None


def _write(path: Path, content: Any) -> None:
    """Replace ``path`` in one step, so that an interruption leaves the old content."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1), encoding="utf-8")
    partial.replace(path)


def _versions() -> dict[str, str]:
    import importlib.metadata as metadata

    found = {}
    for name in ("torch", "megatron-core", "transformer-engine", "megatron-fluid"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _picture(losses: Mapping[str, Mapping[str, float]], path: Path, title: str) -> Path | None:
    """Training and held-out loss by iteration."""
    if not losses["train"]:
        return None
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for name, label, style in (("train", "training", "-"), ("held_out", "held out", "o-")):
        points = sorted((int(iteration), loss) for iteration, loss in losses[name].items())
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label, markersize=4, linewidth=1.2)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("iteration")
    axes.set_ylabel("loss (nats a token)")
    axes.grid(alpha=0.3)
    axes.legend()
    FigureCanvasAgg(figure).print_figure(path, dpi=120)
    return path
