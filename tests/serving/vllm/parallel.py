"""Two ranks on one machine: the program of `test_processes.py`. Writes a JSON object with what was said and read."""

import json
import sys
from pathlib import Path

from tests.serving.vllm.conftest import answers, engine
from tests.support.reasoner import questions

if __name__ == "__main__":  # vLLM starts its workers by running this file again
    options = json.loads(sys.argv[1])
    with engine(**options) as llm:
        sequences = answers(llm, questions(12, 20, 16, 14), 400)
        Path(sys.argv[2]).write_text(json.dumps({"said": sequences, "stats": llm.collective_rpc("seergate_stats")}))
