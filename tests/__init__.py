"""A package, so that tests share helpers as `tests.…`, whatever packages of that name are installed."""
