"""`nanoserve serve`: an OpenAI-compatible server for one model. Flag names are vLLM's where they mean the same.

Reads the arguments and takes the port before the model is loaded; needs the `serve` extra.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import os
import sys
from contextlib import ExitStack

from nanoserve.api.cli_engine import (
    add_engine_arguments,
    announce_compiling,
    api_key_argument,
    as_argument,
    config_from_args,
    open_recorder,
    parse_size,
    size_argument,
)

PACKAGES = ("starlette", "uvicorn", "prometheus_client")
ENGINE_DIED = 1  # exit code
DEFAULT_MAX_REQUEST_BYTES = 8 * 2**20


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise ValueError(f"{text} is not a positive number of seconds.")
    return value


def _port(text: str) -> int:
    port = parse_size(text)
    if port > 65535:
        raise ValueError(f"port {port} is larger than 65535; 0 takes any free one.")
    return port


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [MODEL] [options]"
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="the same as --model")
    http = parser.add_argument_group("HTTP")
    http.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1, this machine only")
    http.add_argument("--port", type=as_argument(_port), default=8000, help="default: 8000; 0: any free one")
    http.add_argument(
        "--served-model-name", nargs="+", action="extend", metavar="NAME", help="default: what --model says"
    )
    http.add_argument(
        "--api-key",
        type=api_key_argument,
        default=os.environ.get("NANOSERVE_API_KEY"),
        metavar="KEY",
        help="ask every request for it; better given as NANOSERVE_API_KEY, which no process list shows",
    )
    http.add_argument(
        "--max-request-bytes",
        type=size_argument,
        default=DEFAULT_MAX_REQUEST_BYTES,
        metavar="SIZE",
        help="largest body; default: 8M",
    )
    http.add_argument(
        "--request-timeout", type=as_argument(_seconds), metavar="SECONDS", help="for a whole request; default: none"
    )
    http.add_argument(
        "--max-waiting", type=size_argument, metavar="N", help="answer 503 when more requests than that would wait"
    )
    http.add_argument("--debug-endpoints", action="store_true", help="serve /debug/blocks and /debug/trace")
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.model_tag is not None:
        if args.model is not None:
            raise ValueError(
                f"the model was given twice, as {args.model_tag} and by --model {args.model}; give it once."
            )
        args.model = args.model_tag
    if args.api_key == "":
        raise ValueError("--api-key is empty; leave it out, or give a key.")
    if not all(name.strip() for name in args.served_model_name or ()):
        raise ValueError("--served-model-name is empty; leave it out, or give a name.")
    config = config_from_args(args)
    announce_compiling(config)
    try:
        from nanoserve.api.listen import Listener, address_of, bind
        from nanoserve.api.server import ApiServer, ServerOptions
    except ModuleNotFoundError as error:
        if error.name not in PACKAGES:
            raise
        raise ValueError(f"nanoserve serve needs {error.name}; pip install 'nanoserve[serve]'.") from None
    from nanoserve.api.async_llm import AsyncLLM

    options = ServerOptions(
        model_names=tuple(args.served_model_name or ()),
        api_key=args.api_key,
        max_request_bytes=args.max_request_bytes,
        request_timeout_s=args.request_timeout,
        debug_endpoints=args.debug_endpoints,
    )
    logging.basicConfig(format="%(levelname)s %(asctime)s %(name)s: %(message)s")
    with ExitStack() as stack:
        sock = stack.enter_context(bind(args.host, args.port))
        recorder = stack.enter_context(open_recorder(args.record))
        llm = AsyncLLM(config=config, observer=recorder, max_waiting=args.max_waiting)
        stack.callback(llm.close)
        server = ApiServer(llm, options)
        listener = Listener(server, sock, config.shutdown_timeout_s)

        info = llm.info
        print(f"engine: {info.device}, {info.dtype}, {info.execution}; {info.execution.memory}", file=sys.stderr)

        def announce() -> None:
            print(f"nanoserve is ready: {server.model_names[0]} at {address_of(sock)}", flush=True)

        asyncio.run(listener.run(announce))
        return ENGINE_DIED if llm.is_dead else 0
