"""Work beside other work: who is in a branch, and that nothing is left behind when something fails."""

import pytest
import torch

from samebit.kernels.branches import beside, in_branch

CPU = torch.device("cpu")


def test_the_work_is_in_a_branch_and_the_body_is_not():
    seen = []
    with beside(lambda: seen.append(in_branch()), CPU):
        seen.append(in_branch())
    assert seen == [True, False]
    assert not in_branch()


def test_work_that_fails_ends_its_branch_and_the_body_does_not_run():
    def fail():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"), beside(fail, CPU):
        raise AssertionError("the body")
    assert not in_branch()


def test_a_branch_has_no_branch():
    def twice():
        with beside(lambda: None, CPU):
            pass

    with pytest.raises(AssertionError, match="branch of a branch"), beside(twice, CPU):
        pass
    assert not in_branch()


@pytest.mark.gpu
def test_a_graph_has_a_branch_and_waits_for_it():
    """The branch takes long, and what follows it reads what it wrote."""
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.ones(1 << 24, device=device)
    side, main, total = (torch.zeros_like(x) for _ in range(3))

    def slow():
        side.copy_(x)
        for _ in range(20):
            side.mul_(1.5).div_(1.5)

    def step():
        with beside(slow, device):
            main.copy_(x)
        torch.add(side, main, out=total)
        x.add_(1)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for n in range(2, 10):
        graph.replay()
        assert torch.allclose(total, torch.full_like(total, 2.0 * n), rtol=1e-5)
        assert torch.equal(main, torch.full_like(main, float(n)))
