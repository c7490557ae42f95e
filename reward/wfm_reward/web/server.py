"""HTTP server of the service, in a separate thread. It serves a status page, metrics, and scores for other programs.

POST /api/reward/enqueue, /api/reward/pull and /api/reward/ping use Cosmos-RL's protocol (`cosmos_protocol`). POST
/compute uses plain JSON (`json_protocol`). GET routes are /, /metrics, /ping, /health and /api/rewards. If a token is
set, all routes except /health require it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from aiohttp import ClientPayloadError, web
from aiohttp.http_exceptions import HttpProcessingError

import wfm_ds
from wfm_ds.errors import RewardError
from wfm_ds.transport.broker import Broker
from wfm_ds.transport.keys import BrokerKeys
from wfm_ds.transport.throttle import get_throttled_logger
from wfm_reward import registry
from wfm_reward.config import ServiceConfig, read_service_token
from wfm_reward.decoder import VaeScale
from wfm_reward.stats import ServiceSnapshot, ServiceStats
from wfm_reward.web.connections import ConnectionAcceptor, open_listeners
from wfm_reward.web.cosmos_protocol import parse_enqueue, pull_reply
from wfm_reward.web.jobs import ScoreJob, ScoreJobs
from wfm_reward.web.json_protocol import compute_reply, parse_compute
from wfm_reward.web.metrics import CONTENT_TYPE, render_metrics
from wfm_reward.web.request_body import MemoryBudget, Reservation, check_encoding, check_token, read_form, receive_body
from wfm_reward.web.requests import HttpProblem, ScoreRequest
from wfm_reward.web.status_page import render_status_page
from wfm_reward.worker_pool import WorkerPool

log = logging.getLogger(__name__)

START_TIMEOUT_S = 30.0
BROKER_TIMEOUT_S = 5.0  # seconds for the broker to report its status
FORM_BYTES = 64 * 1024
MAX_ERROR_CHARS = 200

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpServer:
    """HTTP server in a thread. Call `start` and `stop` from the same thread."""

    def __init__(
        self,
        config: ServiceConfig,
        base: Path,
        *,
        broker: Broker,
        workers: WorkerPool,
        stats: ServiceStats,
        keys: BrokerKeys | None,
    ) -> None:
        """base: folder of the configuration file. Raises RewardError for an invalid token or an unreadable VAE."""
        assert config.http is not None
        self.config = config.http
        self.url = ""
        self._rewards, self._decoders = config.rewards, config.latent_decoders
        self._broker, self._workers, self._stats, self._keys = broker, workers, stats, keys
        self._budget = MemoryBudget(self.config.max_pending_mib * 2**20)
        self._vae_scales = {n: VaeScale.from_vae_config(n, decoder.vae) for n, decoder in self._decoders.items()}
        self._token = read_service_token(self.config, base, os.environ)
        self._requests: Counter[tuple[str, int]] = Counter()
        self._client_log = get_throttled_logger(f"{__name__}.clients")
        self._client_log.addFilter(_shorten_parse_error)
        self._started_at_s = time.monotonic()
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._error: Exception | None = None
        self._serving: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run_thread, name="http", daemon=True)

    def start(self) -> None:
        """Start the thread. The broker must be running. Raises RewardError if the address cannot be bound."""
        self._thread.start()
        if not self._ready.wait(START_TIMEOUT_S) or self._error is not None:
            raise RewardError(f"cannot listen at http.bind {self.config.bind}: {self._error or 'timeout'}")

    def stop(self) -> None:
        """Let current requests finish for a short time, then end the thread."""
        if self._thread.is_alive() and self._serving is not None:
            with contextlib.suppress(RuntimeError):  # the loop is already closed
                self._loop.call_soon_threadsafe(self._serving.cancel)
            self._thread.join(10)

    # Runs in the thread

    def _run_thread(self) -> None:
        try:
            self._loop.run_until_complete(self._serve_requests())
        except Exception as error:  # `start` reports it
            if self._ready.is_set():
                log.exception("the HTTP server failed")
            self._error = error
        finally:
            self._ready.set()
            self._loop.close()

    async def _serve_requests(self) -> None:
        host, _, port = self.config.bind.rpartition(":")
        runner = web.AppRunner(
            self._create_app(), access_log=None, shutdown_timeout=2.0, auto_decompress=False, logger=self._client_log
        )
        await runner.setup()
        assert runner.server is not None
        self._connections = ConnectionAcceptor(
            runner.server, self.config.max_connections, self.config.idle_timeout_s, self._client_log
        )
        try:
            with contextlib.ExitStack() as stack:
                listeners = [stack.enter_context(one) for one in open_listeners(host.strip("[]"), int(port))]
                bound, port_number = listeners[0].getsockname()[:2]
                self.url = f"http://[{bound}]:{port_number}" if ":" in bound else f"http://{bound}:{port_number}"
                self._serving = self._loop.create_task(self._connections.serve(listeners))
                self._ready.set()
                with contextlib.suppress(asyncio.CancelledError):
                    await self._serving
        finally:
            await runner.cleanup()

    def _create_app(self) -> web.Application:
        app = web.Application(middlewares=[self._process_request], client_max_size=FORM_BYTES)
        app.add_routes([
            web.get("/", self._handle_page),
            web.get("/health", self._handle_health),
            web.get("/metrics", self._handle_metrics),
            web.get("/ping", self._handle_ping),
            web.get("/api/rewards", self._handle_rewards),
            web.post("/api/reward/ping", self._handle_ping),
            web.post("/api/reward/pin", self._handle_ping),
            web.post("/api/reward/enqueue", self._handle_enqueue),
            web.post("/api/reward/pull", self._handle_pull),
            web.post("/compute", self._handle_compute),
        ])  # fmt: skip
        app.cleanup_ctx.append(self._manage_jobs)
        return app

    async def _manage_jobs(self, app: web.Application) -> AsyncIterator[None]:
        max_batch = {name: registry.resolve_max_batch(name, reward.max_batch) for name, reward in self._rewards.items()}
        keys = None if self._keys is None else self._keys.local_client_keys
        self._jobs = ScoreJobs(self._broker.client_endpoint, max_batch, self.config.result_ttl_s, keys)
        yield
        await asyncio.to_thread(self._jobs.close)

    @web.middleware
    async def _process_request(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        with self._connections.track_request(request.protocol):
            response = await self._respond_safely(request, handler)
        self._requests[_route_name(request), response.status] += 1
        if response.status >= 400 and not request.content.is_eof():
            response.force_close()  # the rest of the body is not read
        return response

    async def _respond_safely(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if _route_name(request) != "/health":
                check_token(request.headers.get("Authorization"), self._token)
            check_encoding(request)
            return await handler(request)
        except HttpProblem as problem:
            response = web.json_response(problem.content, status=problem.status)
            if problem.retry_after_s is not None:
                response.headers["Retry-After"] = str(problem.retry_after_s)
            if problem.status == 401:
                response.headers["WWW-Authenticate"] = 'Basic realm="wfm_reward: the password is the token"'
            return response
        except web.HTTPException as error:
            return web.json_response({"message": error.reason}, status=error.status)
        except (ClientPayloadError, ConnectionError) as error:
            return web.json_response({"message": f"the body was cut off: {error}"}, status=400)
        except Exception as error:  # noqa: BLE001  (keep the service running)
            self._client_log.exception("%s %s failed", request.method, _route_name(request))
            return web.json_response({"message": f"{type(error).__name__}: see the log of the service"}, status=500)

    # Status and metrics

    async def _create_snapshot(self) -> ServiceSnapshot:
        try:
            status = await asyncio.wait_for(asyncio.wrap_future(self._broker.request_status()), BROKER_TIMEOUT_S)
        except (TimeoutError, asyncio.CancelledError) as error:
            raise HttpProblem(503, "stopping", "no reply from the broker: the service is stopping") from error
        now_s = time.monotonic()
        return ServiceSnapshot(
            version=wfm_ds.__version__,
            uptime_s=now_s - self._started_at_s,
            broker=status,
            rewards=list(self._rewards),
            stats=self._stats.snapshot(),
            workers=self._workers.worker_states(),
            down_reasons=dict(self._workers.down_reasons),
            requests=self._requests.copy(),
            pending_bytes=self._budget.reserved_bytes,
            now_s=now_s,
            wall_s=time.time(),
        )

    async def _handle_page(self, request: web.Request) -> web.Response:
        text = await asyncio.to_thread(render_status_page, await self._create_snapshot())
        policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
        headers = {"Content-Security-Policy": policy, "Cache-Control": "no-store"}
        return web.Response(text=text, content_type="text/html", headers=headers)

    async def _handle_metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=render_metrics(await self._create_snapshot()), headers={"Content-Type": CONTENT_TYPE})

    async def _handle_health(self, request: web.Request) -> web.Response:
        waiting = self._workers.unready_rewards()
        content = {"ready": False, "waiting_for": waiting} if waiting else {"ready": True}
        return web.json_response(content, status=503 if waiting else 200)

    async def _handle_ping(self, request: web.Request) -> web.Response:
        self._check_ready()
        return web.json_response({"message": "Ping request received"})

    async def _handle_rewards(self, request: web.Request) -> web.Response:
        return web.json_response({name: _reward_info(name) for name in self._rewards})

    # Scores

    async def _handle_enqueue(self, request: web.Request) -> web.Response:
        self._check_ready()
        async with self._receive_body(request) as (body, reservation):
            score_request = await asyncio.to_thread(parse_enqueue, body)
            # Arrays may be views of the body, which then stays in memory until they are scored.
            num_bytes = max(score_request.nbytes, len(body))
            job = self._start_job(score_request, reservation, num_bytes, self.config.timeout_s)
        return web.json_response({"uuid": job.id})

    async def _handle_pull(self, request: web.Request) -> web.Response:
        fields = await read_form(request, self.config.body_timeout_s)
        job = self._jobs.find_job(str(fields.get("uuid", "")))
        reward = str(fields.get("type") or next(iter(job.results)))
        results = job.results.get(reward)
        if results is None:
            rewards = ", ".join(job.results)
            raise HttpProblem(404, "unknown_type", f"{job.id} has no reward {reward[:80]!r}; it has {rewards}")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(results.done.wait(), self.config.pull_wait_s)
        if not results.done.is_set():
            raise HttpProblem(400, "not_ready", f"the scores of {job.id} are not ready: pull again")
        content = pull_reply(
            reward,
            registry.get_reward_class(reward).primary_output,
            results.items,
            info=job.info,
            seconds=results.seconds,
            decode_seconds=job.decode_s,
            failed_value=math.nan if self.config.failed_value == "nan" else None,
        )
        return web.json_response(content)

    async def _handle_compute(self, request: web.Request) -> web.Response:
        self._check_ready()
        async with self._receive_body(request) as (body, reservation):
            score_request, timeout_s = await asyncio.to_thread(parse_compute, body, reservation.grow)
            seconds = min(timeout_s or math.inf, self.config.timeout_s)
            job = self._start_job(score_request, reservation, score_request.nbytes, seconds)
            del score_request, body  # only the job still holds the arrays
        try:
            await asyncio.gather(*(results.done.wait() for results in job.results.values()))
        finally:
            self._jobs.forget_job(job)
        return web.json_response(compute_reply({name: results.items for name, results in job.results.items()}))

    def _check_ready(self) -> None:
        waiting = self._workers.unready_rewards()
        if waiting and not self._workers.has_been_ready:
            raise HttpProblem(503, "loading", f"still loading: {', '.join(waiting)}", retry_after_s=5)

    def _start_job(
        self, score_request: ScoreRequest, reservation: Reservation, num_bytes: int, timeout_s: float
    ) -> ScoreJob:
        """Start a job that takes over the reservation.

        Raises HttpProblem if the service does not have a requested reward or a decoder for the latents.
        """
        if unknown := [name for name in score_request.rewards if name not in self._rewards]:
            detail = f"unknown reward {unknown[0][:80]!r}; this service has {', '.join(self._rewards)}"
            raise HttpProblem(422, "unknown_reward", detail)
        decoder = self._decoder_kind(score_request) if score_request.latents else None
        if decoder is not None:  # decoded videos are held in addition to the latents
            num_bytes += sum(self._vae_scales[item.shape[0]].video_bytes(item.shape) for item in score_request.media)
        return self._jobs.start_job(score_request, reservation.transfer(num_bytes), timeout_s, decoder)

    def _decoder_kind(self, score_request: ScoreRequest) -> str:
        channels, known = score_request.media[0].shape[0], self._decoders
        if channels not in known:
            available = f"decoders for {', '.join(map(str, known))} channels" if known else "no latent decoders"
            detail = f"latents with {channels} channels; this service has {available}: send pixels"
            raise HttpProblem(422, "no_decoder", detail)
        return f"decode:{channels}"

    def _receive_body(self, request: web.Request) -> AbstractAsyncContextManager[tuple[memoryview, Reservation]]:
        return receive_body(request, self._budget, self.config.max_body_mib * 2**20, self.config.body_timeout_s)


def _shorten_parse_error(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError):
        text = " ".join(str(error).split())[:MAX_ERROR_CHARS]
        record.msg, record.args, record.exc_info = f"{record.getMessage()}: {text}", None, None
    return True


def _route_name(request: web.Request) -> str:
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else "other"


def _reward_info(name: str) -> dict[str, Any]:
    reward = registry.get_reward_class(name)
    outputs = {
        output: [limit if math.isfinite(limit) else None for limit in (limits.low, limits.high)]
        for output, limits in reward.outputs.items()
    }
    needs = [*reward.required_metadata, *reward.required_inputs]
    return {"media": sorted(reward.media_types), "primary": reward.primary_output, "outputs": outputs, "needs": needs}
