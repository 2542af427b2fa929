"""lm-eval with a generating task: evals_lm_eval.py WHERE MODEL QUESTIONS [PACKAGES].

WHERE is a base URL, or `here` for `baton.LLM` in this process, which then finds lm-eval in the
folder PACKAGES. QUESTIONS is a file of lines with a question and the answer that is right.
"""

import json
import sys
import tempfile
from pathlib import Path

where, model, questions, *packages = sys.argv[1:]
sys.path += packages

from lm_eval import simple_evaluate  # noqa: E402 - from the folder above
from lm_eval.api.model import LM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

TASK = {
    "task": "capitals",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": questions}},
    "test_split": "test",
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8, "do_sample": False},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}


class Here(LM):
    """A model in this process, as lm-eval wants one."""

    def __init__(self, llm):
        super().__init__()
        self._llm = llm

    def generate_until(self, requests, disable_tqdm=False):
        """Texts, up to the first stop text."""
        told = [one.args[1] for one in requests]
        found = self._llm.generate(
            [one.args[0] for one in requests],
            max_tokens=told[0]["max_gen_toks"],
            stop=told[0]["until"],
            temperature=0.0,
        )
        return [one.text for one in found]

    def loglikelihood(self, requests, disable_tqdm=False):
        """No task of ours asks for it."""
        raise NotImplementedError

    loglikelihood_rolling = loglikelihood


def evaluate(lm, **options):
    """The part of the questions that are answered right."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "capitals.yaml").write_text(json.dumps(TASK))
        tasks = TaskManager(include_path=folder, include_defaults=False)
        found = simple_evaluate(lm, tasks=["capitals"], task_manager=tasks, **options)
    return found["results"]["capitals"]["exact_match,none"]


if where == "here":
    from baton import LLM

    with LLM(model) as llm:
        right = evaluate(Here(llm))
else:
    given = {"model": model, "base_url": f"{where}/completions", "num_concurrent": 4}
    given |= {"tokenized_requests": False, "tokenizer_backend": None}
    right = evaluate("local-completions", model_args=given)
print(json.dumps({"right": right}))
