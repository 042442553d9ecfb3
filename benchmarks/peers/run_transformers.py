"""transformers' `generate` on left-padded batches of 32."""

import torch
import transformers
from loads import Ids, Load
from serve import own_stdout, parser, serve
from transformers import AutoModelForCausalLM

BATCH, PAD = 32, 0


def main() -> None:
    args, answers = parser().parse_args(), own_stdout()
    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, attn_implementation="sdpa").eval()

    @torch.inference_mode()
    def generate(load: Load) -> list[Ids]:
        found: list[Ids] = []
        for first in range(0, len(load.prompts), BATCH):
            prompts, counts = load.prompts[first : first + BATCH], load.num_tokens[first : first + BATCH]
            width = max(map(len, prompts))
            ids = torch.tensor([[PAD] * (width - len(p)) + p for p in prompts])
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
            out = model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=max(counts),
                eos_token_id=-1,
                pad_token_id=PAD,
            )
            found += [row[:count] for row, count in zip(out[:, width:].tolist(), counts, strict=True)]
        return found

    about = {"name": "transformers generate", "version": transformers.__version__, "torch": torch.__version__}
    serve(answers, about, args.vocab_size, generate, None)


if __name__ == "__main__":
    main()
