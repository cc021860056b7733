"""The one tree of errors: each class has its HTTP status and a machine-readable code.

Errors of libraries are mapped into this tree once, at the boundary where they appear.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType


class ThunderAgentError(Exception):
    """Report that something which was asked for cannot be done.

    `status` is the HTTP status a caller gets, `code` the machine-readable word for it in the error body.
    `retry_after_s` is set where trying again later makes sense. `answer_headers` are what the answer that tells of it
    bears besides: set by whoever knows more of the request.
    """

    status: int = 500
    code: str = "internal_error"
    retry_after_s: int | None = None
    answer_headers: Mapping[str, str] = MappingProxyType({})

    @property
    def turn_verdict(self) -> str:
        """Return whose fault it is that a turn ends with this: a `TurnVerdict`."""
        return "agent_error" if self.status < 500 else "infrastructure_failed"

    @property
    def message(self) -> str:
        """Return the sentence that tells a caller what went wrong."""
        return str(self)


class ConfigurationError(ThunderAgentError):
    """The configuration is wrong; nothing was started."""

    code = "configuration_error"


class DiscoveryError(ConfigurationError):
    """A source of replicas cannot say which there are: what it says is wrong, or it does not answer."""


class TraceError(ConfigurationError):
    """A recorded trace cannot be read; the message names the file and the line."""


class LifecycleError(ThunderAgentError):
    """An event met a program in a phase and status that know no such event: a bug; carries the story."""

    code = "lifecycle_error"


class EventLogError(ThunderAgentError):
    """A line of an event log cannot be read, or a replay decided otherwise than the log says."""

    code = "event_log_error"


class StateError(ThunderAgentError):
    """A file of what was learned cannot be taken in; the message says why."""

    code = "state_error"


class CalibrationError(ThunderAgentError):
    """An engine cannot be measured, or its times tell no profile; only `thunderagent calibrate` says so."""

    code = "calibration_error"


class CalibrationRefusedError(CalibrationError):
    """The engine answered a request of the calibration with another status than 200: `engine_status`."""

    def __init__(self, message: str, *, engine_status: int) -> None:
        """Keep the engine's status beside the sentence that tells its answer."""
        super().__init__(message)
        self.engine_status = engine_status


class RequestError(ThunderAgentError):
    """The request is invalid; the message says why."""

    status = 400
    code = "invalid_request"


class InvalidProgramIdError(RequestError):
    """A program id, or another name, is empty, too long (256 bytes), not text, or holds control characters."""

    code = "invalid_program_id"


class KeyNeededError(RequestError):
    """The request has no API key, or an unknown one."""

    status = 401
    code = "invalid_api_key"


class AdminKeyNeededError(RequestError):
    """The request has a data key where an admin key is needed."""

    status = 403
    code = "admin_key_needed"


class OriginRefusedError(RequestError):
    """A web page of an origin that is not allowed sent the request."""

    status = 403
    code = "origin_refused"


class OtherTenantError(RequestError):
    """The program belongs to another tenant than the request's key."""

    status = 403
    code = "other_tenant"


class HostRefusedError(RequestError):
    """The request's `Host` is not a name of the proxy."""

    status = 421
    code = "host_refused"


class ExpectationError(RequestError):
    """The request has an `Expect` that is not known here."""

    status = 417
    code = "expectation_failed"


class BodyTimeoutError(RequestError):
    """The body of a request did not come in time."""

    status = 408
    code = "body_timeout"


class RateLimitedError(RequestError):
    """Too many requests to the admin API, or leases for their patience; turns wait instead."""

    status = 429
    code = "rate_limited"
    retry_after_s = 1


class KeyHeldLimitError(RequestError):
    """This key or its tenant holds the most turns, or bytes of their bodies, that it may."""

    status = 429
    code = "key_held_limit"
    retry_after_s = 10


class KeyProgramsLimitError(RequestError):
    """This key has the most live programs that it may."""

    status = 429
    code = "key_programs_limit"
    retry_after_s = 10


class KeysNotChangedError(RequestError):
    """The file of keys cannot be read or written, so no key was made."""

    status = 409
    code = "keys_not_changed"


class KeyExistsError(RequestError):
    """There is a key of that name already."""

    status = 409
    code = "key_exists"


class UnreadableEncodingError(RequestError):
    """The request body is packed in a way that is not read here; the message names those that are, or an extra."""

    status = 415
    code = "unreadable_encoding"


class BodyTooLargeError(RequestError):
    """A request body is over the configured limit."""

    status = 413
    code = "body_too_large"


class RolloutsOffError(ThunderAgentError):
    """Rollouts are not recorded; `--rollouts` turns that on."""

    status = 400
    code = "rollouts_off"


class NoRolloutError(ThunderAgentError):
    """There is no rollout of that program, or it is another tenant's."""

    status = 404
    code = "no_rollout"


class RolloutDroppedError(ThunderAgentError):
    """The rollout of that program was dropped: memory or disk was short, its time was over, or it was deleted."""

    status = 410
    code = "rollout_dropped"


class NotFoundError(RequestError):
    """No such program, replica or path."""

    status = 404
    code = "not_found"


class UnknownModelError(NotFoundError):
    """No replica lists the model that a request names, or several models are served and it names none."""

    code = "model_not_found"


class MethodNotAllowedError(RequestError):
    """The path is one of the proxy's, but not with that method; the answer's `Allow` says with which."""

    status = 405
    code = "method_not_allowed"


class UpgradeRefusedError(RequestError):
    """A websocket is asked for on a path whose turns are plain requests: send it as one."""

    status = 426
    code = "websocket_not_passed"


class PerReplicaOnlyError(RequestError):
    """An engine control call that differs for each replica was sent to all of them."""

    status = 409
    code = "per_replica_only"


class ReplicaLeavingError(RequestError):
    """The replica is leaving, because no source names it any more: it takes no new turns."""

    status = 409
    code = "replica_leaving"


class OperationRefusedError(RequestError):
    """The operation is not possible with this program or replica now; the message says why."""

    status = 409
    code = "operation_refused"


class ProvisionError(ThunderAgentError):
    """A replica cannot be started or ended."""

    status = 502
    code = "provision_failed"


class ProvisionOffError(OperationRefusedError):
    """Starting and ending replicas is not configured (`--provision`)."""

    code = "provision_off"


class ProvisionLimitError(OperationRefusedError):
    """The limit of started replicas, the largest or the smallest, is reached."""

    code = "provision_limit"


class ProgramKilledError(ThunderAgentError):
    """An operator or a policy ended the program while this turn waited; the turn was never forwarded."""

    status = 410
    code = "program_killed"


class ProgramReleasedError(ThunderAgentError):
    """The program was released while this turn waited; the turn was never forwarded.

    410, not 409: clients of the OpenAI API try a 409 again, which would open the program anew.
    """

    status = 410
    code = "program_released"


class ProgramHopelessError(ThunderAgentError):
    """The program was ended because a judge expects it to fail; the turn was never forwarded.

    410 for the same reason. Its client may release the program, and open it anew if it thinks otherwise.
    """

    status = 410
    code = "program_hopeless"


class ProgramLimitError(ThunderAgentError):
    """The program has had all the turns, tokens or time that its limits allow; the turn was never forwarded.

    410 for the same reason. Its limits are those of its headers, of its key and of the proxy: the least counts.
    """

    status = 410
    code = "program_limit"


class ProgramDeadlineError(ProgramLimitError):
    """The program's deadline has passed, or cannot be met any more; the turn was never forwarded."""

    code = "program_deadline"


class ProgramStaleError(ThunderAgentError):
    """The weights have changed more often since the program's first turn than its bound allows; the turn was aborted.

    410 for the same reason. Its client gives the rollout up, and releases the program.
    """

    status = 410
    code = "program_stale"

    @property
    def turn_verdict(self) -> str:
        """Return that it was the trainer's doing."""
        return "aborted_by_trainer"


class TurnAbortedError(ThunderAgentError):
    """A trainer aborted this turn, or all, while it was held; the turn was never forwarded.

    Whoever asked for the turn gets what the engine answers for a request that it aborts, and this error only if that
    cannot be said in the API that it called.
    """

    status = 503
    code = "turn_aborted"
    retry_after_s = 1

    @property
    def turn_verdict(self) -> str:
        """Return that it was the trainer's doing."""
        return "aborted_by_trainer"


class TurnSupersededError(ThunderAgentError):
    """The client retried the same turn, and the retry took the place of this attempt.

    410, not 409, for the same reason: a client that is still there must not try again, too.
    """

    status = 410
    code = "turn_superseded"


class TooManyHeldError(ThunderAgentError):
    """The limit of held turns, or of bytes of their bodies, is reached; the turn was never forwarded."""

    status = 503
    code = "too_many_held"
    retry_after_s = 10


class TooManyProgramsError(ThunderAgentError):
    """The limit of live programs is reached, and all of them have turns; this one was not opened."""

    status = 503
    code = "too_many_programs"
    retry_after_s = 10


class NoRoomInTimeError(ThunderAgentError):
    """There was no room before the client would time out, and no overdraft was left; the turn was not forwarded."""

    status = 503
    code = "no_room_in_time"
    retry_after_s = 10


class NoReplicaError(ThunderAgentError):
    """No replica has been usable for longer than the configured limit."""

    status = 503
    code = "no_replica"
    retry_after_s = 10


class ShuttingDownError(ThunderAgentError):
    """The proxy is shutting down and grants no new lease."""

    status = 503
    code = "shutting_down"
    retry_after_s = 5


class SchedulerUnreachableError(ThunderAgentError):
    """A gateway needs its scheduler for this answer, and the scheduler does not respond."""

    status = 503
    code = "scheduler_unreachable"
    retry_after_s = 2


class StandingByError(ThunderAgentError):
    """This scheduler stands by; another one leads."""

    status = 503
    code = "standing_by"
    retry_after_s = 1


class StoreError(ThunderAgentError):
    """The schedulers' store refused a command; the message says why."""

    status = 503
    code = "store_error"


class FencedError(StoreError):
    """Another scheduler leads now, so this one can write nothing more."""

    code = "fenced"


class BadFrameError(ThunderAgentError):
    """The other side of a link between gateway and scheduler sent an invalid frame; the link is closed."""

    code = "bad_frame"


class TooManyListenersError(ThunderAgentError):
    """The limit of listeners to the stream of events is reached."""

    status = 503
    code = "too_many_listeners"
    retry_after_s = 10


class ReplicaError(ThunderAgentError):
    """A replica failed a request at the level of the connection; `replica_id` says which."""

    status = 502
    code = "replica_error"

    def __init__(self, message: str, *, replica_id: str) -> None:
        """Keep which replica failed beside the sentence that says how."""
        super().__init__(message)
        self.replica_id = replica_id


class ReplicasDisagreeError(ThunderAgentError):
    """Some replicas did not do what a control call told all of them; the answer has what each one said."""

    status = 502
    code = "replicas_disagree"


class ReplicaUnreachableError(ReplicaError):
    """No connection to the replica could be made: nothing was sent."""

    code = "replica_unreachable"


class ConnectTimeoutError(ReplicaUnreachableError):
    """No connection to the replica was made within the configured limit."""

    status = 504
    code = "connect_timeout"


class ReplicaTrippedError(ReplicaUnreachableError):
    """The replica's breaker is half open and its one trial turn failed; nothing was sent."""

    code = "replica_tripped"


class ReplicaRefusedError(ReplicaUnreachableError):
    """The connection was refused: the replica is down."""


class ReplicaRedirectError(ReplicaError):
    """The replica redirects to another server, which would bypass keys and the scheduler."""

    code = "replica_redirects"


class ReplicaRemovedError(ReplicaUnreachableError):
    """The replica was removed: nothing is sent there any more."""

    code = "replica_removed"


class ReplicaClosedEarlyError(ReplicaError):
    """The replica closed the connection before its answer was whole."""

    code = "replica_closed_early"


class ReplicaAnswerTooLargeError(ReplicaError):
    """The replica answered with more than can be kept, where the answer must be whole."""

    code = "replica_answer_too_large"


class ReplicaGarbledError(ReplicaError):
    """The replica answered, and the answer cannot be read as HTTP. The turn ran there, so it is not tried again."""

    code = "replica_garbled"


class ReplicaLostError(ReplicaError):
    """The replica was declared silent or frozen while the request was in flight there."""

    code = "replica_lost"


class ReplicaTimeoutError(ReplicaError):
    """The replica sent no byte for longer than the configured limit."""

    status = 504
    code = "replica_timeout"


class FirstByteTimeoutError(ReplicaTimeoutError):
    """The replica took the request, and did not begin to answer within the configured limit."""

    code = "first_byte_timeout"


class TotalTimeoutError(ReplicaTimeoutError):
    """The answer took longer than the configured limit, from the sending of the request to its last byte."""

    code = "total_timeout"


class SandboxError(ThunderAgentError):
    """A sandbox cannot be made, reached or removed. `may_recover` says whether a retry makes sense."""

    status = 502
    code = "sandbox_error"
    may_recover = True
    for_operators: str = ""
    """What only the log may tell: what a service answered, and where it is. Empty: the message says it all."""

    @property
    def for_log(self) -> str:
        """Return what the operator's log says of it."""
        return self.for_operators or self.message


class SandboxEngineError(SandboxError):
    """Docker or the cluster does not answer; it may come back."""

    status = 503
    code = "sandbox_engine_unreachable"
    retry_after_s = 10


class SandboxPullLimitError(SandboxEngineError):
    """A registry lets nothing be pulled for a while; `retry_after_s` says for how long nothing is asked of it."""

    code = "sandbox_pull_limit"


class SandboxImageError(SandboxError):
    """There is no such image, here or where it would be pulled from."""

    code = "sandbox_image_missing"
    may_recover = False


class SandboxSpaceError(SandboxError):
    """The engine's disk or memory is full."""

    status = 503
    code = "sandbox_no_space"
    retry_after_s = 30


class SandboxSetupError(SandboxError):
    """A sandbox was made, but a setup command failed, it ended by itself, or it did not become ready in time."""

    code = "sandbox_setup_failed"


class SandboxRefusedError(SandboxError):
    """The engine refuses what the template asks for."""

    status = 422
    code = "sandbox_refused"
    may_recover = False


class SandboxConflictError(SandboxError):
    """Something else has that name or port."""

    status = 409
    code = "sandbox_conflict"
