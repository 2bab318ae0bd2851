"""Mistakes that LayerNormLinear over ranks might have, each with the case or check that must find it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from parallel_cases import COLS, GROUPS

from cunorm.torch import LayerNormLinear
from cunorm.torch.linear import call, exchange, symmetric, wide
from cunorm.torch.linear import step as steps


def gathered_gradient_dropped(dy, dz, *others):
    return steps.gradients(dy, None, *others)


def gathered_gradient_after_the_sum(dy, dz, saved, step, ranks, *others):
    own = dz.chunk(ranks.size)[dist.get_rank(exchange.group_of(ranks.group))]
    return steps.gradients(dy, own, saved, step._replace(returned=steps.LOCAL), ranks, *others)


def norm_gradients_summed(*arguments):
    dx, *sums = RIGHT_NORM_GRADIENTS(*arguments)
    for gradient in sums:
        dist.all_reduce(gradient, group=GROUPS[2])
    return dx, *sums


RIGHT_NORM_GRADIENTS = steps.norm_gradients


class OtherOrder(exchange._Gathering):
    def whole(self, keep=False):
        return super().whole(keep).view(self.exchange.ranks, -1, COLS).flip(0).reshape(-1, COLS)


class OwnAlone(exchange._Gathering):
    def whole(self, keep=False):
        super().whole()
        rows = torch.zeros_like(self._rows)
        count, rank = len(self.own), self.exchange.rank
        rows[rank * count : (rank + 1) * count] = self.own
        return rows


class OtherRows(exchange._Summing):
    def result(self):
        exchange._wait(self._work)
        other = (self.exchange.rank + 1) % self.exchange.ranks
        dist.all_reduce(self.place, group=self.exchange.group)
        return self.place.chunk(self.exchange.ranks)[other].clone()


class TooEarly(symmetric._Gathering):
    """Rows are pulled before their rank has written them."""

    def _greet(self):
        other = self.exchange.others[0]
        self._part(self._whole, other).copy_(self._part(self._of_ranks[other], other))
        super()._greet()

    def start(self, rows, wanted_next=False):
        with self.exchange.side.after_present() as mark:
            self._greet()
            self._come[self.exchange.others[0]] = mark()
            self._take_leave(mark)


class OfTheSender(symmetric._Summing):
    """Terms are read of the sender's rows, and not of those that this rank wants."""

    def _part(self, matrix, rank):
        return super()._part(matrix, rank if matrix is self._whole else 1 - rank)


def unmarked(self):
    RIGHT_SETTLING(self)
    for name, parameter in self.named_parameters():
        if name.startswith("layer_norm"):
            parameter.sequence_parallel = False


RIGHT_SETTLING = LayerNormLinear._settle_parameters

# Each mistake is (owner, attribute, what is put in its place, the case or check that must fail).
MISTAKES = {
    "gradient of gathered z dropped": (
        call,
        "gradients",
        gathered_gradient_dropped,
        "z of all rows returned",
    ),
    "gradient of gathered z added after the sum": (
        call,
        "gradients",
        gathered_gradient_after_the_sum,
        "z of all rows returned",
    ),
    "dgamma summed over the ranks": (steps, "norm_gradients", norm_gradients_summed, "as it is"),
    "rows in another order": (exchange, "_Gathering", OtherOrder, "as it is"),
    "rows of another rank": (exchange, "_Summing", OtherRows, "as it is"),
    "local z alone in the gradient of weight": (exchange, "_Gathering", OwnAlone, "as it is"),
    "parts in another order": (
        wide,
        "in_turn",
        lambda rank, ranks: [rank] * ranks,
        "overlaps_change_nothing",
    ),
    "rows pulled too early": (symmetric, "_Gathering", TooEarly, "delays"),
    "terms of the sender's rows": (symmetric, "_Summing", OfTheSender, "overlaps_by_symmetric_memory"),
    "an attribute lost": (LayerNormLinear, "_settle_parameters", unmarked, "attributes"),
}
