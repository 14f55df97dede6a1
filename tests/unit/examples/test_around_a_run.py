"""What the example does around a training: proposed commands, accepted folders, shown lines."""

import argparse
import io
import multiprocessing
import os
import re
import select
import signal
import sys
import time
from pathlib import Path
from traceback import StackSummary
from typing import Any

import next_commands as nc
import pretrain_defaults as pd
import pytest
import run_folder
import run_output
import torch
from run_folder import RunFolder
from run_signals import StopRequest
from torch.distributed.checkpoint.api import CheckpointException


def _args(folder: Path, **given: Any) -> argparse.Namespace:
    """Megatron's arguments of a run of the example without flags, as far as they are looked at."""
    (folder / "latest_checkpointed_iteration.txt").write_text("64")
    (folder / "iter_0000064").mkdir(exist_ok=True)
    settings = pd.default_settings({}, pd.Machine(2, False, False, False, False))
    own = {"save": str(folder), "train_samples": None, "consumed_train_samples": 0}
    return argparse.Namespace(**{**settings, **own, **given})


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt_moe.py"])


@pytest.mark.parametrize("unit", ["iters", "samples"])
def test_the_command_to_train_on_goes_on_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unit: str
) -> None:
    words = f"--train-{unit} 64 --skip-train --profile --profile-step-end 3 --lr 1e-3"
    words += " --load before --finetune --ckpt-step 5 --no-load-optim --no-load-rng"
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt_moe.py", *words.split()])
    args = _args(tmp_path, train_iters=64, train_samples=64 if unit == "samples" else None)
    found = next(line for line in nc.next_commands(args, None) if "--load" in line).split()
    kept = found[found.index(next(word for word in found if word.endswith(".py"))) + 1 :]
    length = f"--train-{unit} 128 --override-opt-param-scheduler"
    assert kept == f"--lr 1e-3 --load {tmp_path} {length}".split()
    title, command = nc.next_commands(_args(tmp_path, train_iters=65, no_save_optim=True), 60.0)[:2]
    assert title == "go on where it stopped (about 60 s):"
    assert command.endswith(" --lr 1e-3 --no-load-optim --resume")
    shorter = nc.next_commands(_args(tmp_path, train_iters=3), None)[1]
    assert f"--load {tmp_path} --train-iters 128 " in shorter


@pytest.mark.parametrize(
    ("cores", "gpus", "ranks"), [(4, 0, 4), (2, 0, 2), (3, 0, 3), (64, 8, 4), (64, 2, 2)]
)
def test_no_more_ranks_than_the_machine_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int, gpus: int, ranks: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    title, command = nc.next_commands(_args(tmp_path), 0.3)[-2:]
    words = command.split()
    assert words[words.index("--nproc_per_node") + 1] == str(ranks)
    assert (f"on {ranks} ranks" in title) == (ranks > 2)


@pytest.mark.parametrize(
    ("flags", "begins"), [("--load absent --save new", False), ("--load=job --save=job", True)]
)
def test_a_checkpoint_that_is_not_there_is_an_error_unless_a_job_is_to_be_started_again(
    flags: str, begins: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", *flags.split()])
    words = flags.replace("=", " ").split()
    load = {"load": words[1]}
    if begins:
        assert RunFolder.choose(load, "run", words[-1], resume=False).resumed is None
        return
    with pytest.raises(ValueError, match="--load: found no checkpoint in absent"):
        RunFolder.choose(load, "run", words[-1], resume=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_is_not_begun_anew_in_the_folder_that_holds_it(tmp_path: Path, resume: bool) -> None:
    folder = _args(tmp_path).save
    with pytest.raises(ValueError, match="--resume: found no --save"):
        RunFolder.choose({}, folder, None, resume=True)
    with pytest.raises(ValueError, match="--save: found '', allowed: a folder"):
        RunFolder.choose({}, "", "", resume)
    given = {"finetune": True, "load": None if resume else folder}
    with pytest.raises(ValueError, match="--finetune: .* goes on to 64, .* would overwrite it"):
        RunFolder.choose(given, folder, folder, resume)
    (tmp_path / "run.json").write_text('[{"parallel": {"expert": 2}}]')
    place = str(tmp_path / "checkpoints") if resume else folder
    args = argparse.Namespace(load=place, no_load_optim=None, finetune=False)
    args.expert_model_parallel_size = 1
    with pytest.raises(ValueError, match="size: found 1, allowed with .*: more than 1; without"):
        RunFolder(tmp_path, None, None).begin(args, None)
    (tmp_path / "run.json").write_text('[{"parallel": {"expert": 1}}, {"parallel": {"expert": 2}}]')
    run_folder._refuse_other_experts(args)
    for found in (b"", b"99", b"\0\0", b"\xff5"):
        (tmp_path / "latest_checkpointed_iteration.txt").write_bytes(found)
        with pytest.raises(ValueError, match="latest_.*txt: found '.*', allowed: the number of a"):
            RunFolder.choose({}, folder, folder, resume)
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    (tmp_path / "iter_0000064" / "mp_rank_00").mkdir()
    (tmp_path / "iter_0000064" / "mp_rank_00" / "cut_off.pt").touch()
    assert RunFolder.choose({}, folder, folder, resume).resumed is None
    (tmp_path / "iter_0000064" / ".metadata").touch()
    with pytest.raises(ValueError, match="txt: found no file beside iter_0000064, allowed: the nu"):
        RunFolder.choose({}, folder, folder, resume)


def test_a_folder_takes_one_run_at_a_time_and_the_next_when_that_is_dead(tmp_path: Path) -> None:
    codes = []
    for given in ({}, {}, {"skip_train": True}):
        if not (rank := os.fork()):
            code = 5
            try:
                RunFolder.choose(given, str(tmp_path), str(tmp_path), resume=False)
                code = 3
            except ValueError as error:
                code = 4 if f"in use by process {os.getppid()} on" in str(error) else 5
            finally:
                os._exit(code)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]))
        RunFolder.choose({}, str(tmp_path), str(tmp_path), resume=False)
    assert codes == [3, 4, 3]


def test_a_checkpoints_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    error = CheckpointException("load", {1: (KeyError("a.weight"), StackSummary())})
    renamed = TimeoutError("no answer from peer 1")
    renamed.__cause__ = error
    for found, begin in ((error, "CheckpointException: "), (renamed, "TimeoutError: no ans")):
        with pytest.raises(SystemExit):
            run_output.RunOutput([]).fail(found, by_user=False)
        last = capsys.readouterr().err.splitlines()[-1]
        assert last.startswith(f"error: {begin}") and last.endswith("rank 1: KeyError: 'a.weight'")


@pytest.mark.parametrize("name", ["WORLD_SIZE", "MASTER_PORT"])
def test_a_variable_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "zz")
    with pytest.raises(SystemExit, match=f"{name}: found 'zz', allowed: a whole number"):
        run_output.RunOutput([])


def test_an_unknown_flag_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument_group("run").add_argument("--train-iters")
    run_output.short_parser(parser, run_output.RunOutput([]))
    with pytest.raises(SystemExit):
        parser.parse_args(["--trian-iters", "5"])
    assert "arguments: --trian-iters 5; did you mean --train-iters?" in capsys.readouterr().err


ITERATION = (
    "[2026] iteration {:8}/ 3 | elapsed time per iteration (ms): 100.0 | global batch size: 8 "
    "| lm loss: 2.5E+00 |\n"
)


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("terminal", [io.StringIO(), Screen()])
def test_iterations_are_a_bar_on_a_terminal_and_lines_in_a_file(
    monkeypatch: pytest.MonkeyPatch, terminal: io.StringIO
) -> None:
    pytest.importorskip("tqdm")
    monkeypatch.setattr(sys, "stdout", terminal)
    output = run_output.RunOutput([])
    output.sequence_length = 64
    for iteration in (1, 2, 3):
        output.write(ITERATION.format(iteration))
    output.write("validation loss at iteration 3 | lm loss value: 2.0E+00 |\n")
    output.write("successfully saved checkpoint from iteration   3 to a b [ t 1/1, p 1/1 ]\n")
    said = terminal.getvalue()
    if terminal.isatty():
        assert "3/3" in said and "loss 2.5000, 5,120 tokens/s" in said
        assert said.count("\n") == 3, "one line, which ends with the training, and two below"
    else:
        lines = said.splitlines()
        assert lines[0] == "iteration 1/3  loss 2.5000  5,120 tokens/s  0:00:00 left"
        assert lines[3:] == ["validation loss 2.0000 at iteration 3", "saved a b at iteration 3"]


@pytest.mark.parametrize(("training", "times"), [(True, 1), (False, 1), (True, 2)])
def test_a_signal_ends_a_rank_unless_it_is_training(training: bool, times: int) -> None:
    if not (rank := os.fork()):
        signal.signal(signal.SIGTERM, lambda *_: None)  # Megatron's
        stop = StopRequest()
        try:
            stop.install()
            if training:
                stop.begin_training()
            for _ in range(times):
                stop._asked_at -= 3  # seconds
                os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os._exit(stop.asked)
    code = os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1])
    assert code == (signal.SIGTERM if training and times == 1 else -signal.SIGTERM)


def test_what_holds_a_saves_results_is_deaf_to_signals_and_ends_with_its_rank() -> None:
    told, tell = os.pipe()
    if not (rank := os.fork()):
        try:
            StopRequest().install()
            holder = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
            holder.start()
            os.write(tell, f"{holder.pid}\n".encode())
            holder.join()
        finally:
            os._exit(1)
    holds = int(os.read(told, 20))
    ended = os.pidfd_open(holds)
    (blocked,) = re.findall(r"SigBlk:\s*(\w+)", Path(f"/proc/{holds}/status").read_text())
    assert int(blocked, 16) >> signal.SIGTERM - 1 & 1
    os.kill(rank, signal.SIGKILL)
    os.waitpid(rank, 0)
    assert select.select([ended], [], [], 120)[0]
