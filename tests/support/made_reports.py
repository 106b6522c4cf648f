"""Run directories as `seergate.eval` writes them, without the work."""

import json

import yaml

TOKENS = {"dense": 40, "gate": 44, "quest": 60}


def write_run(root, method, budget, right, *, n=20, recall=None, model="m", completion=None, **config):
    """A run directory as `seergate.eval` writes it, with answers that are right where ``right`` says so."""
    directory = root / (method if budget is None else f"{method}-{budget}")
    directory.mkdir(parents=True)
    described = {"name": method, "nominal": "all" if budget is None else str(budget)}
    described |= {} if budget is None else {"token_budget": budget, "block_size": 16}
    sampling = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    settings = {
        "task": {"name": "chain_sum", "problems": n, "n_problems": n, "chance": 0.1, "contents": "c"},
        "method": described,
        "model": {"path": model, "type": "qwen3", "parameters": 1000, "dtype": "float32", "fingerprint": model},
        "gates": None,
        "generation": {"samples": 1, "max_new_tokens": 99, "seed": 0} | sampling,
        "environment": {"seergate": "0", "git": None, "torch": "2", "hardware": {"cpu": "x"}},
        **config,
    }
    (directory / "config.yaml").write_text(yaml.safe_dump(settings))
    lines = []
    for i in range(n):
        sample = {"task": "chain_sum", "problem_id": str(i), "sample_idx": 0, "completion": completion}
        sample |= {"n_prompt_tokens": 60, "n_tokens": TOKENS.get(method, 50) + i % 3, "finish_reason": "stop"}
        sample |= {"pred": "1", "gold": "1", "correct": bool(right(i)), "seconds": 0.5}
        sample |= {"density": 1.0 if budget is None else budget / 100, "cached_tokens": 150.0}
        sample |= {"bytes_read_per_step": 5000.0, "own_bytes_mean": 70000.0, "own_bytes_peak": 80000.0}
        lines.append(json.dumps(sample) + "\n")
    (directory / "samples.jsonl").write_text("".join(lines))
    if recall is not None:
        mean = sum(recall) / len(recall)
        record = {"recall": mean, "recall_per_layer": recall, "layers": [0, 2], "next_token_kl": 1 - mean}
        record |= {"next_token_kl_p99": 2.5, "perplexity": 2.0, "dense_perplexity": 1.5, "agreement": 0.9}
        record |= {"windows": 4, "tokens_per_window": 8, "contexts": "c0ffee", "reference": "dense"}
        (directory / "proxies.json").write_text(json.dumps(record))
    return directory


def reconfigure(directory, **sections):
    """Change a run's configuration: section -> what is new in it."""
    path = directory / "config.yaml"
    config = yaml.safe_load(path.read_text())
    for name, values in sections.items():
        config[name] = (config[name] or {}) | values
    path.write_text(yaml.safe_dump(config))


def write_method(root, name, budget, right, **options):
    """As `write_run`, with options in the configuration and in the directory's name; ``nominal`` like the real one."""
    directory = write_run(root, name, budget, right)
    reconfigure(directory, method=options)
    label = "-".join([directory.name, *(f"{key}={value}" for key, value in options.items() if key != "nominal")])
    return directory.rename(root / label)


def cells(text):
    """The cells of every line of the Markdown tables in a text, heads and rules included."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
