# The verbs of this repository; `.ci/run` does what `just check` does from nothing, in its own environment.

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

# the test suite on every core; --require-demo: the real model's tests may not be skipped
test:
    OMP_NUM_THREADS=1 {{python}} -m pytest --require-demo -n auto

# all that must be green before a change lands
check: lint types test

# kernels, packing and whole native decoders under the address and undefined-behaviour sanitizers, their pool under the thread sanitizer
sanitize:
    PYTHON={{python}} .ci/sanitize tests/model/test_native.py tests/model/test_pack.py
    POOL_RUNS=5000 {{python}} -m pytest tests/kernels/test_pool.py -q --timeout 3600

# ten minutes of mixed clients against a live service, five with the tiny model and five with the scripted one
soak seconds="300":
    {{python}} bench/soak.py --recipe tiny --seconds {{seconds}}
    {{python}} bench/soak.py --recipe mock --seconds {{seconds}}

# many more examples than the test suite tries, and other ones each time
fuzz examples="1500":
    FUZZ_EXAMPLES={{examples}} {{python}} -m pytest tests/fuzz -q --timeout 7200

# random lives of sequences over a shared pool: accounts and tokens after every step
machine examples="3000":
    MACHINE_EXAMPLES={{examples}} {{python}} -m pytest tests/kv/test_prefix_machine.py -q --timeout 7200

# every operation and every stage broken in turn, then at random under pressure
faults seeds="200":
    CHAOS_SEEDS={{seeds}} {{python}} -m pytest tests/faults -q --timeout 7200

# both official SDKs over the whole surface, and the golden frames of both dialects
wire:
    {{python}} -m pytest tests/server/test_sdks.py tests/protocols/test_golden.py -q

# speed and memory of a recipe on this machine, ours alone, e.g. `just bench +recipe=chat_paged model.weights=float32`
bench *arguments="+recipe=chat_paged":
    {{python}} bench/peers.py --model own --work prefill,decode,start {{arguments}}

# beside other engines, e.g. `just peers --model demo --llama-bin DIR`; see bench/README.md
peers *arguments:
    {{python}} bench/peers.py --out docs/bench.json {{arguments}}

# the picture of the README from what `just peers` has measured
plot:
    {{python}} bench/plot.py docs/bench.json docs/bench.png
