"""One program of each group is the last; it sees what all stored, and leaves the counters as they were."""

import pytest
import torch
import triton
import triton.language as tl

from samebit.kernels.branches import beside
from samebit.kernels.triton.last import MAX_COUNTERS, PAST_L1, counters, is_last
from samebit.kernels.triton.launch import launch


@triton.jit
def sum_of_shares_kernel(shares, sums, times, counter, step, size, width, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Program (p, g) stores p + g + step in every column of its share; the last of a group adds the shares of all."""
    group = tl.program_id(1)
    column = tl.arange(0, WIDTH)
    at = (group * size + tl.program_id(0)) * width + column
    tl.store(shares + at, tl.zeros((WIDTH,), tl.int32) + tl.program_id(0) + group + step, mask=column < width)
    if is_last(counter + group, size):
        member = tl.arange(0, SIZE)[:, None]
        of_all = (group * size + member) * width + column[None, :]
        wanted = (member < size) & (column < width)[None, :]
        found = tl.load(shares + of_all, mask=wanted, other=0, cache_modifier=PAST_L1)
        tl.store(sums + group * width + column, tl.sum(found, 0), mask=column < width)
        tl.atomic_add(times + group, 1)


class Groups:
    """``num_groups`` groups of ``size`` programs, each with shares of ``width`` numbers."""

    def __init__(self, device, num_groups, size, width, num_warps=4):
        self.sizes, self.device, self.num_warps = (num_groups, size, width), device, num_warps
        self.shares = torch.full(self.sizes, -1, dtype=torch.int32, device=device)
        self.sums = torch.full((num_groups, width), -1, dtype=torch.int32, device=device)
        self.times = torch.zeros(num_groups, dtype=torch.int32, device=device)

    def run(self, step):
        num_groups, size, width = self.sizes
        launch(
            sum_of_shares_kernel, (size, num_groups), self.shares, self.sums, self.times, counters(self.device), step,
            size, width, SIZE=triton.next_power_of_2(size), WIDTH=triton.next_power_of_2(width), num_warps=self.num_warps,
        )  # fmt: skip

    def wanted(self, step):
        num_groups, size, width = self.sizes
        group = torch.arange(num_groups, dtype=torch.int32, device=self.device)
        return ((group + step) * size + size * (size - 1) // 2)[:, None].expand(-1, width).int()


@pytest.mark.parametrize(("num_groups", "size", "width"), [(1, 1, 1), (3, 4, 63), (2, 7, 100)])
def test_the_last_of_a_group_sees_what_all_stored_in_every_launch(device, num_groups, size, width):
    groups = Groups(device, num_groups, size, width)
    for step in range(3):
        groups.run(step)
        assert torch.equal(groups.sums, groups.wanted(step))
        assert (groups.times == step + 1).all()
        assert (counters(device) == 0).all()


def test_counters_stay_where_they_are(device):
    assert counters(device) is counters(device)
    assert counters(device).shape == (MAX_COUNTERS,)


def test_a_branch_has_counters_of_its_own(device):
    found = []
    with beside(lambda: found.append(counters(device)), device):
        assert counters(device).data_ptr() != found[0].data_ptr()
    with beside(lambda: found.append(counters(device)), device):
        assert counters(device) is not found[1]
    assert found[0] is found[1]


@pytest.mark.gpu
def test_a_branch_and_what_runs_beside_it_count_by_themselves(device):
    """Long launches of many groups on both sides of a captured branch; a count of the other's would be a wrong last one."""
    one, other = Groups(device, 64, 100, 512), Groups(device, 64, 70, 512)

    def step(number):
        with beside(lambda: one.run(number), device):
            other.run(number)
            other.run(number)

    step(0)
    torch.cuda.synchronize()
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(1, 9):
            step(number)
            wrong += sum((groups.sums != groups.wanted(number)).sum() for groups in (one, other))
    for _ in range(50):
        graph.replay()
    assert int(wrong) == 0
    assert (one.times == 1 + 8 * 50).all()
    assert (other.times == 2 * (1 + 8 * 50)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("num_warps", [1, 4, 8])
@pytest.mark.parametrize(("num_groups", "size", "width"), [(1000, 5, 1000), (3, 1000, 16), (64, 128, 128)])
def test_no_share_is_missed_however_often_a_graph_is_launched(device, num_groups, size, width, num_warps):
    """Shares are spoiled between launches, so an old one would be seen."""
    groups = Groups(device, num_groups, size, width, num_warps)
    groups.run(0)
    torch.cuda.synchronize()
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step in range(1, 9):
            groups.run(step)
            wrong += (groups.sums != groups.wanted(step)).sum()
            groups.shares.fill_(-1)
    for _ in range(50):
        graph.replay()
    assert int(wrong) == 0
    assert (groups.times == 1 + 8 * 50).all()
    assert (counters(device) == 0).all()
