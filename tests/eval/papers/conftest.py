from tests.eval.report.test_published import bank  # noqa: F401
