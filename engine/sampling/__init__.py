"""Drawing the next token of every row of a step.

Life cycle:
1. A sequence takes a slot: `Sampler.assign` fills the slot's row of the host's columns.
2. The step loop plans a step: `Sampler.plan` collects the options of the rows in a `SamplePlan`,
   with their noise. It touches nothing on the device. The plan also carries the resets of the
   slots' tables and their first entries.
3. The executor runs the step: `Sampler.sample` turns logits and plan into tokens. It counts them in
   the device's tables, so that the next step sees them before the host has read them.
4. Another sequence takes the slot (1), and the last one's data is dropped.

Invariant: every plan is sampled exactly once, in the order planned. Steps 1 and 2 belong to the
step loop's thread, step 3 to the executor's. They share only the plan.

The order of operations is that of vLLM's V1 sampler (`vllm/v1/sample/sampler.py`), which follows
the OpenAI API where that defines it:
1. log probabilities of the model's own distribution, before any change to it;
2. `min_tokens` (ids that would end the sequence cannot be drawn) and `logit_bias`;
3. repetition penalty over prompt and output, then frequency and presence over the output; then the
   mask: tokens that the form of the output does not allow cannot be drawn;
4. greedy rows take the best token here, the lowest id among equals;
5. temperature; 6. min-p; 7. top-k; 8. top-p over what is left, renormalised;
9. one token by inverse CDF, in the order of the vocabulary, at the row's uniform number.

Steps 6 to 8 each give one floor per row: a token stays if its logit reaches it. So a token that
ties with the last kept one is kept, too, and the other rows of the batch have no influence.

A feature works on the rows that ask for it and costs nothing if none does. Shapes follow from the
plan alone, and nothing here waits for the device.
"""

from engine.sampling.ops import Scores, score
from engine.sampling.sampler import Sampler, SampleResult

__all__ = ["SampleResult", "Sampler", "Scores", "score"]
