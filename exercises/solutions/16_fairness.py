class MyPolicy(RankedScheduler):
    def rank(self, request: Request, waited: int) -> float:
        """Short ones first; a long one counts as shorter with every step that it waits."""
        return request.num_tokens - 4 * waited
