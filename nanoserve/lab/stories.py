"""Plain children's stories put together at random: text of the kind that the embedded model has learned.

Any number of different ones from a seed, so that a workload can ask for prompts of any length.
"""

from __future__ import annotations

import random

_NAMES = (
    "Lily",
    "Tom",
    "Mia",
    "Ben",
    "Sara",
    "Max",
    "Anna",
    "Tim",
    "Lucy",
    "Sam",
    "Emma",
    "Jack",
    "Rosie",
    "Leo",
)
_WORDS: dict[str, tuple[str, ...]] = {
    "animal": ("dog", "cat", "bird", "bunny", "frog", "bear", "duck", "mouse", "fox", "pony", "turtle"),
    "thing": ("ball", "kite", "boat", "hat", "drum", "cake", "book", "shell", "bell", "leaf", "truck"),
    "place": ("park", "garden", "forest", "lake", "beach", "big house", "old barn", "hill", "little shop"),
    "mood": ("happy", "sad", "brave", "tired", "curious", "excited", "scared", "proud", "shy", "calm"),
}  # fmt: skip
_OPENINGS = (
    "Once upon a time, there was a little {animal} who lived near the {place}.",
    "One day, {name} went to the {place} with a {thing}.",
    "{name} and {other} were playing at the {place}.",
    "{name} had a {mood} {animal} and a new {thing}.",
)
_MIDDLES = (
    "{name} saw a {thing} under the tree and felt {mood}.",
    'The {animal} said, "Hello, {name}! Do you want to look for my {thing}?"',
    "They ran to the {place}, but the {thing} was not there.",
    '"I am so {mood}," said {other}. "Let us ask the {animal}."',
    "{other} gave the {thing} to the {animal}, and the {animal} was {mood}.",
    "It started to rain, so they hid near the {place} until the sun came out.",
)
_ENDINGS = (
    "{name} went home with the {thing} and told Mom about the {animal}.",
    "From that day on, {name} and the {animal} were best friends.",
    "They all laughed and shared the {thing}. The end.",
)


def story(rng: random.Random) -> str:
    """A story of about ten sentences, ending in a newline; the same for the same state of the generator."""
    name, other = rng.sample(_NAMES, 2)
    lines = [rng.choice(_OPENINGS), *rng.choices(_MIDDLES, k=rng.randint(6, 9)), rng.choice(_ENDINGS)]
    told = []
    for line in lines:
        words = {kind: rng.choice(choices) for kind, choices in _WORDS.items()}
        told.append(line.format(name=name, other=other, **words))
    return " ".join(told) + "\n"
