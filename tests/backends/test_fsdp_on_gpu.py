"""FSDP over NCCL, with ranks that share one GPU: losses and weights are those of one process."""

import pytest
from test_fsdp import STEPS, assert_close, start, state


@pytest.mark.parametrize(
    "options",
    [{"early": True}, {"fsdp": "reshard=no"}, {"fsdp": "offload"}],
    ids=["weights on the GPU", "ZeRO-2", "weights in the memory of the host"],
)
def test_fsdp_over_nccl_has_the_losses_norms_and_weights_of_one_process(nccl, options):
    own = {name: value for name, value in options.items() if not name.startswith("fsdp")}
    expected, *_ = start(1, "one", "single", runner=nccl, **own)
    rows, share, _ = start(3, "many", "fsdp", runner=nccl, **options)
    assert share <= 0.6  # 3 of 5 rows
    for name in ("loss", "grad_norm"):
        assert [r[name] for r in rows] == pytest.approx([r[name] for r in expected], rel=1e-9)
    assert_close(state("many"), state("one"), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("after", [("fsdp", 3), ("fsdp", 2), ("ddp", 3), ("single", 1)], ids=str)
def test_fsdp_over_nccl_resumes_for_each_backend_and_world(nccl, after):
    start(after[1], "whole", after[0], runner=nccl)
    start(3, "parts", "fsdp", runner=nccl, max_steps=10)
    start(after[1], "parts", after[0], runner=nccl, resume=True, elastic=after[1] != 3)
    found, expected = state("parts"), state("whole")
    assert found["position"]["step"] == expected["position"]["step"] == STEPS
    exact = {"rtol": 0, "atol": 0} if after == ("fsdp", 3) else {"rtol": 1e-9, "atol": 1e-9}
    assert_close(found, expected, **exact)


def test_bf16_over_nccl_trains_in_half_precision(nccl):
    rows, _, _ = start(2, "run", "fsdp", runner=nccl, precision="bf16", epochs=20)
    losses = [row["loss"] for row in rows]
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])
