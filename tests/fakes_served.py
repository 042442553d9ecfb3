"""Runners without a model behind the embedded model's tokenizer, for servers in processes of their own."""

import fakes_records
import faulty

VOCAB_SIZE = 4096  # larger than the tokenizer's


class FakeRunner(fakes_records.FakeRunner):
    vocab_size = VOCAB_SIZE


class WrongRunner(fakes_records.WrongRunner):
    vocab_size = VOCAB_SIZE


class DiesInStep(faulty.DiesInStep):
    vocab_size = VOCAB_SIZE
