"""Workers are struck under running streams: two prefill and two decode workers, and what becomes of
their requests when some of them die, hang, stand still or lose their router."""

PREFILLS = ("prefill-0", "prefill-1")
DECODES = ("decode-0", "decode-1")
