"""The scheduler: its parts, and what they share.

    Requests    states of requests, from submission to release; the events that are to be reported
    Batch       columns by slot, prompts in computation, transfers for the next step
    Admission   slots and pages for waiting requests
    Planner     the plan of the next step; it runs one step ahead of the settler
    Settler     the results of the oldest step in flight
    Recovery    a step, or a hook in it, that failed
    Masking     the tokens that rows may draw

Each part names in its constructor what it reads and changes. `engine.bounds` has the limits of a
worker.
"""

from __future__ import annotations

import numpy as np

from engine.adapters.registry import Adapters
from engine.bounds import Bounds
from engine.groups.others import OtherGroups
from engine.hooks.requests import RequestHooks
from engine.pages.blocks import BlockManager
from engine.schedule.admission import Admission
from engine.schedule.batch import Batch
from engine.schedule.masking import Masking
from engine.schedule.planning import Planner
from engine.schedule.policies import Fcfs, SchedulingPolicy
from engine.schedule.recovery import Recovery
from engine.schedule.requests import Requests
from engine.schedule.settling import Settler
from engine.speculation.stats import DraftStats
from engine.speculation.widths import Widths
from engine.step.budget import StepBudget
from engine.step.lanes import Lanes
from engine.step.sampling import SamplePlanner
from engine.tiers.peers import Fetches
from engine.tiers.protocol import NoTiers, PageTiers


class Scheduler:
    """Joins the parts. Only the step loop's thread may use them."""

    def __init__(
        self,
        config: Bounds,
        blocks: BlockManager,
        sampler: SamplePlanner,
        policy: SchedulingPolicy | None = None,
        tiers: PageTiers | None = None,
        hooks: RequestHooks | None = None,
        others: OtherGroups | None = None,
        widths: Widths | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        """`blocks` are the pages of group 0."""
        self.config = config
        self.blocks = blocks
        self.others = others or OtherGroups()
        """The groups beyond group 0."""
        self.tiers = tiers or NoTiers()
        self.hooks = hooks
        self.fetches = Fetches(blocks, self.tiers, self.others)
        self.budget = StepBudget(config)
        speculates = widths is not None
        self.lanes = Lanes(config.pp, config.max_sequences)
        self.batch = Batch(config, blocks, self.others, sampler, hooks, speculates=speculates)
        self.requests = Requests(
            config, blocks, self.batch, self.tiers, hooks, adapters or Adapters()
        )
        shared = config, blocks, self.batch, self.requests, self.budget
        self.admission = Admission(
            *shared, policy=policy or Fcfs(), tiers=self.tiers, fetches=self.fetches
        )
        self.planner = Planner(*shared, self.tiers, widths, self.lanes)
        self.masking = Masking(self.batch, self.requests)
        self.recovery = Recovery(*shared[1:], hooks, self.tiers, self.lanes)
        self.drafts = DraftStats(widths.most - 1) if widths else None
        self.settler = Settler(
            *shared,
            tiers=self.tiers,
            masking=self.masking,
            recovery=self.recovery,
            drafts=self.drafts,
        )

    def check_invariants(self) -> None:
        """Raises AssertionError if pages, slots and requests disagree."""
        self.blocks.check_invariants()
        for number, group in enumerate(self.others.groups, 1):
            group.blocks.check_invariants()
            group.check()
            holders = np.zeros(group.blocks.num_pages, np.int32)
            self.tiers.add_holders(holders, number)
            self.fetches.add_holders(holders, number)
            self.requests.add_other_holders(holders, number)
            group.blocks.check_holders(holders)
        holders = np.zeros(self.blocks.num_pages, np.int32)
        self.tiers.add_holders(holders)
        self.fetches.add_holders(holders)
        self.requests.add_holders(holders)
        self.blocks.check_holders(holders)
