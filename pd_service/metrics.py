"""The gateway's metrics, in a registry of their own, so that several gateways can live in one process.

Every request given to the gateway ends in exactly one outcome of `pd_requests_total`; the sum of the outcomes plus the
live requests equals the submissions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from pd_service.errors import PdError, TransferFailure

_LATENCY_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Outcome(Enum):
    """How a request ended, seen from the gateway."""

    FINISHED = "finished"
    ABORTED = "aborted"  # the client went away
    DEADLINE = "deadline"
    REFUSED = "refused"  # before any engine heard of it
    FAILED = "failed"


class GatewayMetrics:
    """Counters and histograms of one gateway; times are in seconds."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "pd_requests_total", "Requests that ended, by outcome.", ["outcome"], registry=self.registry
        )
        self._tokens = Counter(
            "pd_tokens_total", "Tokens of accepted prompts and tokens delivered.", ["kind"], registry=self.registry
        )
        self._phase_s = Histogram(
            "pd_phase_seconds",
            "Time a finished request spent in each phase.",
            ["phase"],
            buckets=_LATENCY_BUCKETS_S,
            registry=self.registry,
        )
        self._retries = Counter(
            "pd_retries_total", "Times a request went round again, by reason.", ["reason"], registry=self.registry
        )
        self._transfer_failures = Counter(
            "pd_transfer_failures_total", "Hand-overs that failed, by reason.", ["reason"], registry=self.registry
        )
        self._scrape_failures = Counter(
            "pd_engine_scrape_failures_total", "Engines that did not answer a scrape.", registry=self.registry
        )
        self._routing_decisions = Counter(
            "pd_routing_decisions_total", "Choices of the router.", ["choice", "reason"], registry=self.registry
        )
        self._draft_tokens = Counter(
            "pd_draft_tokens_total",
            "Guesses verified by speculative decoding, by whether they proved right.",
            ["outcome"],
            registry=self.registry,
        )
        self.ttft_s = Histogram(
            "pd_ttft_seconds",
            "From the acceptance of a request to its first token.",
            buckets=_LATENCY_BUCKETS_S,
            registry=self.registry,
        )
        self.inter_token_s = Histogram(
            "pd_inter_token_seconds",
            "Between two tokens of a request.",
            buckets=_LATENCY_BUCKETS_S,
            registry=self.registry,
        )
        self.live_requests = Gauge("pd_live_requests", "Requests that have not ended.", registry=self.registry)
        self._output_tokens = self._tokens.labels("output")
        self._prompt_tokens = self._tokens.labels("prompt")
        for outcome in Outcome:
            self._requests.labels(outcome.value)  # shown as 0 before the first one
        for reason in TransferFailure:
            self._transfer_failures.labels(reason.value)

    def count_outcome(self, outcome: Outcome) -> None:
        self._requests.labels(outcome.value).inc()

    @contextmanager
    def counting_refusal(self) -> Iterator[None]:
        """For the doors: a request that is no request at all is a submission too, and is refused."""
        try:
            yield
        except PdError:
            self.count_outcome(Outcome.REFUSED)
            raise

    def count_prompt_tokens(self, num_tokens: int) -> None:
        self._prompt_tokens.inc(num_tokens)

    def count_output_tokens(self, num_tokens: int) -> None:
        self._output_tokens.inc(num_tokens)

    def count_retry(self, reason: str) -> None:
        """`reason` is the name of the error class that sent a request round again."""
        self._retries.labels(reason).inc()

    def count_transfer_failure(self, reason: TransferFailure) -> None:
        """A decode engine did not get the KV of a ticket."""
        self._transfer_failures.labels(reason.value).inc()

    def count_scrape_failures(self, num_engines: int) -> None:
        self._scrape_failures.inc(num_engines)

    def count_routing_decision(self, choice: str, reason: str) -> None:
        """`choice` and `reason` come from small fixed sets; they never hold names of engines or requests."""
        self._routing_decisions.labels(choice, reason).inc()

    def count_drafts(self, num_verified: int, num_accepted: int) -> None:
        """The acceptance rate is accepted / (accepted + rejected)."""
        if num_verified:
            self._draft_tokens.labels("accepted").inc(num_accepted)
            self._draft_tokens.labels("rejected").inc(num_verified - num_accepted)

    def observe_phase(self, phase: str, seconds: float) -> None:
        self._phase_s.labels(phase).observe(seconds)

    def render(self) -> bytes:
        """The registry in Prometheus' text format."""
        return generate_latest(self.registry)
