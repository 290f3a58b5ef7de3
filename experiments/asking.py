"""From metrics to a batch, and from a run's values back to metrics.

`Ask` says what must be run so that metrics can be read, and where to look: a batch of right-padded rows, the positions
whose logits are read, the tensors wanted. Whoever runs it (a sweep, `HookedModel.run`) hands back what was seen, and
`Ask.values` makes numbers of it, one for each prompt.

An answer of several tokens is forced: its prompt is continued by the answer's tokens but the last, and each token is
read from the logits before it. A prompt has a row for each continuation that isn't the beginning of another one; where
all answers are single tokens that is one row, the prompt itself. Named positions of an edit (``T=-1``, spans, slices)
count the prompt's tokens (``spoken``, see `hooks.where.Rows`), and so mean in each row what they mean in the prompt
alone; an edit without positions acts on the continuation too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from experiments.metrics import BadMetric, Compared, Metric, Read, View, choose
from experiments.prompts import Answer, Prompts, padded
from hooks import Edit, HookedModel, Live, Run
from hooks.edits import SCORES
from hooks.where import Rows, Spans, where_of
from probe.errors import asking
from probe.sites import Site

LOGITS = Site(None, "logits")

Seen = Mapping[Site, Tensor]
"""What a run shows: the logits [B R V] at `Ask.read` (rows with fewer than R places are padded behind), any other site
[B T ...] as it is."""

Tail = tuple[int, ...]
"""What stands behind a prompt in a row: the beginning of an answer."""

AT_ONCE = 2**24
"""Numbers of a run that metrics look at together: 128 MiB in float64. Where there are more, prompts go in parts."""


class _Place(NamedTuple):
    """A position of a row, the token that is looked up in its logits, and the spelling of an answer that it is of,
    counted over all prompts."""

    prompt: int
    row: int
    position: int
    token: int
    spelling: int


class _Index(NamedTuple):
    """N places among a batch's read logits [B R V], by prompt: tensors made once, for all cells.

    Attributes:
        row, slot, token, prompt, spelling: [N] each, as of `_Place`; the slot is the position's place in `Ask.read`.
        spelt: [spellings], the prompt of each.
        starts, spellings: of each prompt, and of the end, the first place and the first spelling.
    """

    row: Tensor
    slot: Tensor
    token: Tensor
    prompt: Tensor
    spelling: Tensor
    spelt: Tensor
    starts: list[int]
    spellings: list[int]

    @classmethod
    def of(cls, places: Sequence[_Place], read: Sequence[Sequence[int]], device: torch.device) -> _Index:
        """The index of these places, every prompt having some, in order."""

        def column(values: Iterable[int]) -> Tensor:
            return torch.tensor(list(values), dtype=torch.long, device=device)

        firsts = [n for n, place in enumerate(places) if n == 0 or place.prompt != places[n - 1].prompt]
        spelt = list({place.spelling: place.prompt for place in places}.values())
        return cls(
            column(place.row for place in places),
            column(read[place.row].index(place.position) for place in places),
            column(place.token for place in places),
            column(place.prompt for place in places),
            column(place.spelling for place in places),
            column(spelt),
            [*firsts, len(places)],
            [*(places[n].spelling for n in firsts), len(spelt)],
        )

    def read(self, logits: Tensor, part: slice) -> Read:
        """What stands at the places of these prompts."""
        some = self if part.stop - part.start == len(self.starts) - 1 else self._cut(part)
        scores = logits[some.row, some.slot].double()
        return Read(scores, some.token, some.prompt, some.spelling, some.spelt, part.stop - part.start)

    def _cut(self, part: slice) -> _Index:
        """Some prompts, counted from 0, as are their spellings; where they start is not kept up."""
        here = slice(self.starts[part.start], self.starts[part.stop])
        spelt = slice(self.spellings[part.start], self.spellings[part.stop])
        return self._replace(
            row=self.row[here],
            slot=self.slot[here],
            token=self.token[here],
            prompt=self.prompt[here] - part.start,
            spelling=self.spelling[here] - spelt.start,
            spelt=self.spelt[spelt] - part.start,
        )


class Ask:
    """What metrics ask of a run on prompts.

    Args:
        metrics: see `experiments.metrics.choose`.

    Attributes:
        prompts, metrics: what was given; names have become metrics.
        tokens, keep: the batch to run, as of `Prompts.batch`: [B T], right-padded, on the model's device.
        spans: each row's named spans.
        spoken: how many tokens of each row are the prompt; the rest is a continuation.
        prompt_of: each row's prompt, ascending: to give each row what its prompt was given.
        read: of each row, the positions whose logits are read, ascending; none, where no metric reads any.
        rows: all that of it which tells where things stand.
        decodes: how many tokens metrics want to see decoded after each prompt, greedily; 0: none do.

    Raises:
        BadMetric, UnknownTensor: as `experiments.metrics.choose`.
        BadEdit, OutOfRange: a prompt lacks a position that a metric reads.
    """

    def __init__(self, model: HookedModel, prompts: Prompts, metrics: Sequence[str | Metric] | None = None) -> None:
        self.prompts, self._sites = prompts, model.sites
        self.metrics = tuple(choose(metrics, prompts.has()))
        self.decodes = max(metric.decodes for metric in self.metrics)
        keys = {need for metric in self.metrics if not metric.decodes for need in metric.needs}
        answers = {key: [answer.tokens for answer in _spelt(prompts, key)] for key in sorted(keys)}
        tails = [_tails(spellings[p] for spellings in answers.values()) for p in range(len(prompts))]
        self.prompt_of = [p for p, some in enumerate(tails) for _ in some]
        self._first = [0, *accumulate(map(len, tails))][:-1]
        rows = [(*prompt.tokens, *tail) for prompt, some in zip(prompts.rows, tails, strict=True) for tail in some]
        self.tokens, self.keep = padded(rows, model.device)
        self.spans: tuple[Spans, ...] = tuple(prompts.rows[p].spans for p in self.prompt_of)
        self.spoken = tuple(len(prompts.rows[p].tokens) for p in self.prompt_of)
        self.rows = Rows.of(self.tokens, self.keep, self.spans, self.spoken)
        here = {metric.name: self._places(metric) for metric in self.metrics if metric.reads is not None}
        said = {key: self._forced(spelt, tails) for key, spelt in answers.items()}
        read = [set[int]() for _ in self.prompt_of]
        for place in (place for places in (*here.values(), *said.values()) for place in places):
            read[place.row].add(place.position)
        self.read = [sorted(some) for some in read]
        self._here, self._said = (
            {name: _Index.of(places, self.read, self.tokens.device) for name, places in kind.items()}
            for kind in (here, said)
        )

    def _places(self, metric: Metric) -> list[_Place]:
        """The positions that a metric reads, in each prompt's first row, with the text's own next token."""
        assert metric.reads is not None, "the caller looks"
        ((_, place),) = where_of({"T": metric.reads})
        found = []
        for p, (row, prompt) in enumerate(zip(self._first, self.prompts.rows, strict=True)):
            with asking(f"{metric.name} of {prompt.clean!r}"):
                positions = self.rows.positions(row, place, "T")
            following = (*prompt.tokens[1:], -1)
            found += [_Place(p, row, position, following[position], p) for position in positions]
        return found

    def _forced(self, spelt: Sequence[Sequence[tuple[int, ...]]], tails: Sequence[Sequence[Tail]]) -> list[_Place]:
        """The tokens of every prompt's answers, each at the position before it."""
        found, spelling = [], 0
        for p, spellings in enumerate(spelt):
            before = len(self.prompts.rows[p].tokens) - 1
            for tokens in spellings:
                row = self._first[p] + next(i for i, tail in enumerate(tails[p]) if _begins(tokens[:-1], tail))
                found += [_Place(p, row, before + i, token, spelling) for i, token in enumerate(tokens)]
                spelling += 1
        return found

    def live(self, edits: Sequence[Edit] = ()) -> Live:
        """The batch, to run along with a sweep."""
        return Live(self.tokens, self.keep, self.spans, spoken=self.spoken, edits=edits)

    def sites(self, block: int | None = None) -> list[Site]:
        """What a run must show: the logits where any are read (at `read`), and the tensors that metrics compare
        (whole), with the experts that their slots hold.

        Args:
            block: the edited block, of a cell with several the last; None: the edit is in no block.

        Raises:
            BadMetric: a metric looks at the edited block, and there is none.
            UnknownTensor, OutOfRange: there is no such tensor in that block.
        """
        wanted = [LOGITS] if any(self.read) else []
        for metric in self.metrics:
            if metric.tensor is not None:
                site = self.site(metric, block)
                wanted += [site, *self._slots(site)]
        return list(dict.fromkeys(wanted))

    def site(self, metric: Metric, block: int | None) -> Site:
        """The tensor that a metric compares, of the edited block where it names none."""
        assert metric.tensor is not None, "the caller looks"
        if metric.tensor.startswith("blocks."):
            return self._sites.find(metric.tensor)
        if block is None:
            raise BadMetric(
                f"{metric.name} is of the edited block's {metric.tensor}, and this edit is in none: say of which block,"
                f" {metric.name.partition(':')[0]}:blocks.0.{metric.tensor}."
            )
        with asking(metric.name):
            return self._sites.find(f"blocks.{block}.{metric.tensor}")

    def _slots(self, site: Site) -> list[Site]:
        """Where the experts are that a tensor's slots hold; nothing for one without slots."""
        return [Site(site.block, "experts")] if "k" in self._sites.node(site).shape else []

    # ---- what was seen ---------------------------------------------------------------------------------------------

    def seen(self, run: Run | Seen, block: int | None = None) -> dict[Site, Tensor]:
        """What a run of this batch shows; it must hold the `sites`, with all positions."""
        found = {site: run[site] for site in self.sites(block)}
        if LOGITS in found:
            most = max(map(len, self.read))
            read = torch.tensor([[*some, *some[-1:] * (most - len(some))] for some in self.read])
            logits = found[LOGITS]
            found[LOGITS] = logits[torch.arange(len(read))[:, None].to(logits.device), read.to(logits.device)]
        return found

    def values(
        self, metric: Metric, seen: Seen, base: Seen, block: int | None = None, *, whose: Ask | None = None
    ) -> Tensor:
        """A metric of what a run shows, one number a prompt: [P] in float64, on the CPU; with a graph, where ``seen``
        has one.

        Args:
            seen: of the edited run; the base's own gives the base's value.
            base: of the base.
            block: the edited block, as for `sites`.
            whose: the ask that ``seen`` is of, where it isn't this one: a source's, of as many prompts.

        Raises:
            BadMetric: a metric that was not asked for, or that looks at what is decoded; one whose function gives
                something else than a number a prompt; prompts of two asks that it can't compare.
        """
        theirs = whose or self
        self.check(metric, theirs)
        if metric.decodes:
            raise BadMetric(f"{metric.name} looks at what is decoded: see Ask.of_decoded.")
        made = []
        for part in self._parts(metric, base, block):
            views = theirs._view(metric, seen, block, part), self._view(metric, base, block, part)
            made.append(_checked(metric, metric.of(*views), part.stop - part.start))
        return torch.cat(made)

    def of_decoded(self, metric: Metric, new: Tensor, base: Tensor) -> Tensor:
        """A metric of what was decoded after each prompt: [P] in float64, on the CPU.

        Args:
            new: [P, n], the tokens decoded in the edited run; n is `decodes` or more, of which the metric takes its
                own number.
            base: the same of the base.

        Raises:
            BadMetric: a metric that was not asked for, or takes nothing decoded; too few tokens.
        """
        self.check(metric, self)
        n, shortest = metric.decodes, min(new.shape[1], base.shape[1])
        if not 0 < n <= shortest:
            raise BadMetric(f"{metric.name} looks at {n} decoded tokens; there are {shortest}.")
        decode, rows = self.prompts.tokenizer.decode, self.prompts.rows
        texts = (tuple(decode(ids) for ids in which[:, :n].tolist()) for which in (new, base))
        return _checked(metric, metric.of(*(View(rows, texts=said) for said in texts)), len(rows))

    def check(self, metric: Metric, theirs: Ask) -> None:
        """Refuse what was not asked, or two runs that a metric can't compare place by place.

        Raises:
            BadMetric: see `values`.
        """
        for ask in (self, theirs):
            if metric.name not in map(str, ask.metrics):
                raise BadMetric(f"{metric.name} was not asked for; {', '.join(map(str, ask.metrics))} were.")
        if theirs is self:
            return
        if len(theirs.prompts) != len(self.prompts):
            raise BadMetric(f"{metric.name}: {len(theirs.prompts)} prompts can't be compared with {len(self.prompts)}.")
        places = [ask._here[metric.name].starts if metric.reads is not None else [] for ask in (self, theirs)]
        lengths = [[len(p.tokens) for p in ask.prompts.rows] if metric.tensor else [] for ask in (self, theirs)]
        if places[0] != places[1] or lengths[0] != lengths[1]:
            raise BadMetric(f"{metric.name} compares position by position, and these prompts are of unequal length.")

    def _parts(self, metric: Metric, base: Seen, block: int | None) -> list[slice]:
        """The prompts in parts that are small enough to look at."""
        size = sum(len(index.row) for index in self._indices(metric).values())
        size *= base[LOGITS].shape[-1] if size else 0
        if metric.tensor is not None:
            size = max(size, base[self.site(metric, block)].numel())
        prompts = len(self.prompts)
        step = max(1, prompts * AT_ONCE // max(size, 1))
        return [slice(p, min(p + step, prompts)) for p in range(0, prompts, step)]

    def _indices(self, metric: Metric) -> dict[str, _Index]:
        here = {} if metric.reads is None else {"read": self._here[metric.name]}
        return here | {key: self._said[key] for key in metric.needs}

    def _view(self, metric: Metric, seen: Seen, block: int | None, part: slice) -> View:
        """What a metric sees of these prompts."""
        reads = {key: index.read(seen[LOGITS], part) for key, index in self._indices(metric).items()}
        compared = None if metric.tensor is None else self._compared(self.site(metric, block), seen, part)
        return View(self.prompts.rows[part], reads, compared)

    def _compared(self, site: Site, seen: Seen, part: slice) -> Compared:
        """A tensor of these prompts, positions second; of scores, what the mask hides is 0."""
        rows = self._first[part]
        value = seen[site][rows]
        if site.tensor in SCORES:
            value = value.movedim(2, 1)
            hidden = torch.ones(value.shape[1], value.shape[-1], dtype=torch.bool, device=value.device).triu(1)
            value = value.masked_fill(hidden[:, None], 0.0)
        lengths = torch.tensor([self.spoken[row] for row in rows], device=value.device)
        real = torch.arange(value.shape[1], device=value.device) < lengths[:, None]
        experts = [seen[slots][rows] for slots in self._slots(site)]
        if experts and experts[0].shape[2] != value.shape[2]:
            raise BadMetric(f"{site}: edits have added experts, of which no number is kept; compare delta_routed.")
        return Compared(value, real, experts[0] if experts else None)


def _checked(metric: Metric, made: object, prompts: int) -> Tensor:
    if not isinstance(made, Tensor) or made.shape != (prompts,):
        what = list(made.shape) if isinstance(made, Tensor) else type(made).__name__
        raise BadMetric(f"{metric.name} gave {what} for {prompts} prompts; a metric gives a tensor [P], a number each.")
    return made.double().cpu()


def _spelt(prompts: Prompts, need: str) -> list[Answer]:
    """What a metric needs read of every prompt: its own answer, or a text that is the same for all."""
    if need.startswith("="):
        return [Answer.of(need[1:], prompts.tokenizer)] * len(prompts)
    return prompts.answers(need)


def _tails(spelt: Iterable[Sequence[Tail]]) -> list[Tail]:
    """What must stand behind a prompt so that each spelling's tokens can be read: none begins another."""
    tails = dict.fromkeys([(), *(tokens[:-1] for spellings in spelt for tokens in spellings)])
    return [tail for tail in tails if not any(tail != other and _begins(tail, other) for other in tails)]


def _begins(tail: Tail, other: Tail) -> bool:
    return other[: len(tail)] == tail
