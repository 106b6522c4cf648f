from tests.report.test_published import bank  # noqa: F401
