"""Drawing the next token of every row of a step.

Life cycle:
1. A sequence takes a slot: `Sampler.assign` fills the slot's row of the host's columns.
2. The step loop plans a step: `Sampler.plan` gathers what the rows ask for into a `SamplePlan`,
   with their noise. Nothing on the device is touched: what a slot's tables must forget or start
   with travels in the plan.
3. The executor runs the step: `Sampler.sample` turns logits and plan into tokens, and counts them
   in the device's tables, so that the next step sees them before the host has read them.
4. Another sequence takes the slot (1): whatever was left of the last one is forgotten.

Invariant: every plan is sampled exactly once, in the order planned. Steps 1 and 2 belong to the
step loop's thread, step 3 to the executor's; the plan is all they share.

Order of operations, that of vLLM's V1 sampler (`vllm/v1/sample/sampler.py`), which follows the
OpenAI API where that speaks:
1. log probabilities of the model's own distribution, before anything below touches it;
2. `min_tokens` (ids that would end the sequence cannot be drawn) and `logit_bias`;
3. repetition penalty over prompt and output, then frequency and presence over the output;
4. greedy rows take the best token here, the lowest id among equals;
5. temperature; 6. min-p; 7. top-k; 8. top-p over what is left, renormalised;
9. one token by inverse CDF, in the order of the vocabulary, at the row's uniform number.

Steps 6 to 8 each come down to one floor per row: a token stays if its logit reaches it. So a token
that ties with the last one kept is kept too, and which rows share the batch changes nothing.

A feature works on the rows that ask for it and costs nothing where none does. Shapes follow from
the plan alone, and nothing here waits for the device.
"""

from engine.sampling.ops import Scores, score
from engine.sampling.plan import SamplePlan
from engine.sampling.sampler import Sampler, SampleResult

__all__ = ["SamplePlan", "SampleResult", "Sampler", "Scores", "score"]
