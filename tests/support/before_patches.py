"""What runs on a rank in which megatron_fluid is not imported before the function does it."""

from typing import Any


def patched_and_reverted(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """What the patches of CPU mode change in torch and Megatron (`during`), what of it stays after
    they were reverted (`after`), and whether CUDA is refused again."""
    import torch.overrides
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    def state() -> dict[str, int]:
        owners = {
            "torch.cuda": torch.cuda, "torch.cuda.random": torch.cuda.random,
            "torch.Tensor": torch.Tensor, "torch.distributed": torch.distributed,
            "data loader": torch.utils.data.dataloader._BaseDataLoaderIter, "random": random,
            "parallel_state": parallel_state, "attention": DotProductAttention,
        }  # fmt: skip
        held = {
            f"{at}.{name}": id(x)
            for at, owner in owners.items()
            for name, x in vars(owner).items()
            if callable(x)
        }
        modes = torch.overrides._get_current_function_mode_stack()
        return held | {"modes": len(modes), "stance": hash(torch._dynamo.eval_frame._stance.stance)}

    def changes(before: dict[str, int]) -> list[str]:
        after = state()
        return sorted(
            name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
        )

    before = state()
    import megatron_fluid.patches
    from tests.support.megatron_world import Case, run_cases

    run_cases(rank, world_size, [Case("one rank")], folder)
    during = changes(before)
    megatron_fluid.patches.revert()
    try:
        torch.zeros(1, device="cuda")
        refused = False
    except (RuntimeError, AssertionError):
        refused = True
    return {"during": during, "after": changes(before), "cuda is refused again": refused}
