def pick_budget(measure: Measure, max_gap_ms: float) -> int:
    low, high = 8, 256  # the answer is in here; `low` keeps the promise
    while low < high:
        middle = (low + high + 1) // 2
        if measure(middle).gap_ms <= max_gap_ms:
            low = middle
        else:
            high = middle - 1
    return low
