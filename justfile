# Five verbs; `.ci/run` does the same from nothing, in its own environment.

python := env("PYTHON", "python")

# the package, editable, with the demo model and everything the tests need
install:
    {{python}} -m pip install -e '.[demo,test]'

# style and format
lint:
    {{python}} -m ruff check .
    {{python}} -m ruff format --check .

# mypy, strict
types:
    {{python}} -m mypy

# the test suite; --require-demo: the real model's tests may not be skipped
test:
    {{python}} -m pytest --require-demo

# all that must be green before a change lands
check: lint types test
