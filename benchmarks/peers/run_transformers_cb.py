"""transformers' continuous batching, with its prefix cache on; a new manager for each load."""

import time

import torch
import transformers
from loads import Ids, Load, Stamps
from serve import own_stdout, parser, serve
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation import ContinuousBatchingConfig

PAGE = 32


def pages_for(load: Load) -> int:
    """Room for everybody at once, so that nobody is set back."""
    late = [load.late] if load.late else []
    requests = [*zip(load.prompts, load.num_tokens, strict=True), *late]
    return 16 + sum((len(prompt) + count) // PAGE + 2 for prompt, count in requests)


def main() -> None:
    args, answers = parser().parse_args(), own_stdout()
    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, attn_implementation="sdpa").eval()
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=1)

    def start(load: Load):
        config = ContinuousBatchingConfig(
            page_size=PAGE, num_blocks=pages_for(load), max_batch_tokens=args.budget, allow_block_sharing=True
        )
        manager = model.init_continuous_batching(generation_config=greedy, continuous_batching_config=config)
        manager.start()
        return manager

    def stream(load: Load) -> tuple[Stamps, list[Ids]]:
        manager, streaming = start(load), load.late is not None  # news of every token only where they are needed

        def add(i: int, prompt: Ids, count: int) -> None:
            ids = {"input_ids": prompt, "request_id": str(i), "max_new_tokens": count, "eos_token_id": -1}
            manager.add_request(**ids, streaming=streaming, record_timestamps=True)

        want = dict(enumerate(load.num_tokens))
        newest: dict[int, object] = {}
        stamps = Stamps()
        for i, prompt in enumerate(load.prompts):
            add(i, prompt, want[i])
        while len(newest) < len(want) or not all(found.is_finished() for found in newest.values()):
            found = manager.get_result(timeout=1)
            if found is None:
                assert manager.is_running(), "the manager has stopped"
                continue
            assert found.error is None, found.error
            newest[int(found.request_id)] = found
            least = min(len(other.generated_tokens) for other in newest.values())
            if load.late and -1 not in want and len(newest) == len(load.prompts) and least >= load.after:
                prompt, want[-1] = load.late
                stamps.late_at = time.perf_counter()
                add(-1, prompt, want[-1])
        manager.stop(block=True)
        stamps.of = {i: list(found.timestamps) for i, found in newest.items()}
        return stamps, [list(newest[i].generated_tokens) for i in sorted(newest)]

    def generate(load: Load) -> list[Ids]:
        return stream(load)[1]

    about = {"name": "transformers, continuous batching", "version": transformers.__version__}
    serve(answers, {**about, "torch": torch.__version__}, args.vocab_size, torch.inference_mode()(generate), stream)


if __name__ == "__main__":
    main()
