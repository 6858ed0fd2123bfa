"""
Kernels for the gated delta rule; `kernels/triton/gated_delta.py` launches them.

For a chunk with keys K, queries Q, values V and the incoming state S, all tokens solve (I + A) N = beta (V - e K S): A
is the strictly lower part of beta K K^T D, where D has the decays from token to token within a document, and e the
decays from the incoming state. Then the results are e Q S + (Q K^T D) N, and the next state is the decayed S
plus (f K)^T N, where f has the decays to the chunk's end.

Products of accumulated tiles in 16 bits take these as they are: Triton 3.6 multiplies their transposes wrongly on
Hopper. A transposed product is computed from transposed loads, or stored and loaded again.
"""

import triton
import triton.language as tl

from drawloom.kernels.triton.launch import cache_launches

MIN_GATE = tl.constexpr(-40.0)
"""exp(-40) is 0 beside anything in float32, and sums with lower gates would lose digits."""


@triton.jit
def locate_chunk(program, length, chunks, CHUNK: tl.constexpr):
    """Return the row, the chunk, its first token among all rows, and whether its tokens exist."""
    row, chunk = program // chunks, program % chunks
    first = row.to(tl.int64) * length + chunk * CHUNK
    return row, chunk, first, chunk * CHUNK + tl.arange(0, CHUNK) < length


@triton.jit
def load_document_borders(ids, before, row, chunk, first, inside, length, CHUNK: tl.constexpr):
    """Return documents by token, for the incoming state and for the last token, and the last token's index."""
    own = tl.load(ids + first + tl.arange(0, CHUNK), mask=inside, other=-2)
    end = tl.minimum(length - chunk * CHUNK, CHUNK) - 1
    incoming = tl.where(chunk > 0, tl.load(ids + first - 1, mask=chunk > 0, other=0), tl.load(before + row))
    return own, incoming, tl.load(ids + first + end), end


@triton.jit
def load_tile(tensor, first, stride, rows, columns, WIDTH: tl.constexpr, inside):
    """Load tokens (rows,) by columns (columns,); tokens are `stride` elements apart."""
    at = tensor + first * stride + (rows[:, None] * stride + columns[None, :])
    return tl.load(at, mask=inside[:, None] & (columns < WIDTH)[None, :], other=0.0)


@triton.jit
def load_transposed(tensor, first, stride, rows, columns, WIDTH: tl.constexpr, inside):
    """Load `load_tile` transposed: columns by tokens."""
    at = tensor + first * stride + (rows[None, :] * stride + columns[:, None])
    return tl.load(at, mask=inside[None, :] & (columns < WIDTH)[:, None], other=0.0)


@triton.jit
def store_tile(tensor, first, stride, rows, columns, WIDTH: tl.constexpr, inside, values):
    """Store tokens (rows,) by columns (columns,); tokens are `stride` elements apart."""
    at = tensor + first * stride + (rows[:, None] * stride + columns[None, :])
    tl.store(at, values.to(tensor.dtype.element_ty), mask=inside[:, None] & (columns < WIDTH)[None, :])


@triton.jit
def tile_of_state(states, number, k_columns, v_columns, K: tl.constexpr, V: tl.constexpr):
    """Return pointers and the mask for a tile (k_columns, v_columns) in a state."""
    at = states + number.to(tl.int64) * (K * V) + (k_columns[:, None] * V + v_columns[None, :])
    return at, (k_columns < K)[:, None] & (v_columns < V)[None, :]


@triton.jit
def mask_document_pairs(own, inside, CHUNK: tl.constexpr):
    """Return the pairs (query, key) within a document, up to the query itself."""
    token = tl.arange(0, CHUNK)
    return (own[:, None] == own[None, :]) & (token[:, None] >= token[None, :]) & inside[:, None]


@triton.jit
def invert_unit_lower_triangular(system, CHUNK: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """
    Invert I + system, for a strictly lower triangular (64, 64), with products in a dtype.

    Blocks with 16 rows on the diagonal are inverted by forward substitution. With D their inverse and B = D times the
    blocks below, the result is (I - B)(I + B^2) D, since B^4 is 0.
    """
    SIZE: tl.constexpr = 16
    COUNT: tl.constexpr = CHUNK // 16
    block, other = tl.arange(0, COUNT)[:, None, None, None], tl.arange(0, COUNT)[None, None, :, None]
    row, column = tl.arange(0, SIZE)[None, :, None], tl.arange(0, SIZE)[None, None, :]
    diagonal = tl.sum(tl.where(block == other, tl.reshape(system, (COUNT, SIZE, COUNT, SIZE)), 0.0), 2)
    solved = tl.where(row == column, 1.0, 0.0) + diagonal * 0.0
    for number in range(SIZE - 1):
        below = tl.sum(tl.where(column == number, diagonal, 0.0), 2)
        done = tl.sum(tl.where(row == number, solved, 0.0), 1)
        solved -= below[:, :, None] * done[:, None, :]
    inverse = tl.reshape(tl.where(block == other, solved[:, :, None, :], 0.0), (CHUNK, CHUNK))
    token = tl.arange(0, CHUNK)
    below = tl.where((token // SIZE)[:, None] > (token // SIZE)[None, :], system, 0.0).to(DTYPE)
    blocks = inverse.to(DTYPE)
    below = tl.dot(blocks, below, input_precision=PRECISION).to(DTYPE)
    squared = tl.dot(below, below, input_precision=PRECISION).to(DTYPE)
    inverse += tl.dot(squared, blocks, input_precision=PRECISION)
    return inverse - tl.dot(below, inverse.to(DTYPE), input_precision=PRECISION)


# fmt: off
@cache_launches
@triton.jit(do_not_specialize=["length", "chunks"])
def solve_chunks(
    k, v, g, beta, ids, before, decays, inverse, keys, written, length, chunks, HEADS: tl.constexpr,
    GROUPS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr, IS_SOLVED: tl.constexpr,
):
    # fmt: on
    """Store, by chunk and head, the sums of decays, the inverse system, and its products with keys and values."""
    row, chunk, first, inside = locate_chunk(tl.program_id(0), length, chunks, CHUNK)
    head = tl.program_id(1)
    own, incoming, _last, _end = load_document_borders(ids, before, row, chunk, first, inside, length, CHUNK)
    token, channel = tl.arange(0, CHUNK), tl.arange(0, BK)
    by_head = (first + token) * HEADS + head
    factors = tl.load(beta + by_head, mask=inside, other=0.0).to(tl.float32)
    key = load_tile(k + (head // GROUPS) * K, first, HEADS // GROUPS * K, token, channel, K, inside)
    if IS_SOLVED:
        sums = tl.load(decays + by_head, mask=inside, other=0.0)
        solved = load_tile(inverse + head * CHUNK, first, HEADS * CHUNK, token, token, CHUNK, inside).to(tl.float32)
    else:
        gates = tl.maximum(tl.load(g + by_head, mask=inside, other=0.0).to(tl.float32), MIN_GATE)
        is_pair = mask_document_pairs(own, inside, CHUNK)
        sums = tl.sum(tl.where(is_pair, gates[None, :], 0.0), 1)
        tl.store(decays + by_head, sums, mask=inside)
        pair_decay = tl.exp(tl.where(is_pair, sums[:, None] - sums[None, :], -float("inf")))
        products = tl.dot(key, tl.trans(key), input_precision=PRECISION)
        system = tl.where(token[:, None] > token[None, :], factors[:, None] * products * pair_decay, 0.0)
        # With unit keys all numbers are small: float16 has the precision of TF32, and shorter products.
        DTYPE: tl.constexpr = tl.float16 if key.dtype.primitive_bitwidth == 16 else tl.float32
        solved = invert_unit_lower_triangular(system, CHUNK, DTYPE, PRECISION)
        store_tile(inverse + head * CHUNK, first, HEADS * CHUNK, token, token, CHUNK, inside, solved)
    from_state = tl.where(own == incoming, tl.exp(sums), 0.0)
    weighted = (solved * (factors * from_state)[None, :]).to(key.dtype)
    product = tl.dot(weighted, key, input_precision=PRECISION)
    store_tile(keys + head * K, first, HEADS * K, token, channel, K, inside, product)
    weighted = (solved * factors[None, :]).to(key.dtype)
    for begin in range(0, V, BV):
        column = begin + tl.arange(0, BV)
        values = load_tile(v + head * V, first, HEADS * V, token, column, V, inside)
        solution = tl.dot(weighted, values, input_precision=PRECISION)
        store_tile(written + head * V, first, HEADS * V, token, column, V, inside, solution)


# fmt: off
@cache_launches
@triton.jit(do_not_specialize=["length", "chunks"])
def carry_states(
    k, keys, written, decays, ids, before, state, states, result, length, chunks, HEADS: tl.constexpr,
    GROUPS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # fmt: on
    """
    Pass the state through a row's chunks: store the state before every chunk, the written values, and the last state.
    """
    row, head = tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    token, channel = tl.arange(0, CHUNK), tl.arange(0, BK)
    column = tl.program_id(0) * BV + tl.arange(0, BV)
    carried = tl.zeros((BK, BV), tl.float32)
    if state is not None:
        first_at, is_state = tile_of_state(state, row * HEADS + head, channel, column, K, V)
        carried += tl.load(first_at, mask=is_state, other=0.0).to(tl.float32)
    incoming = tl.load(before + row)
    for chunk in range(0, chunks):
        at, is_state = tile_of_state(states, (row * chunks + chunk) * HEADS + head, channel, column, K, V)
        narrow = carried.to(states.dtype.element_ty)
        tl.store(at, narrow, mask=is_state)
        first = row.to(tl.int64) * length + chunk * CHUNK
        inside = chunk * CHUNK + token < length
        end = tl.minimum(length - chunk * CHUNK, CHUNK) - 1
        own = tl.load(ids + first + token, mask=inside, other=-2)
        last = tl.load(ids + first + end)
        sums = tl.load(decays + (first + token) * HEADS + head, mask=inside, other=0.0)
        total = tl.load(decays + (first + end) * HEADS + head)
        seen = load_tile(keys + head * K, first, HEADS * K, token, channel, K, inside)
        values = load_tile(written + head * V, first, HEADS * V, token, column, V, inside).to(tl.float32)
        values -= tl.dot(seen, narrow, input_precision=PRECISION)
        store_tile(written + head * V, first, HEADS * V, token, column, V, inside, values)
        to_end = tl.exp(tl.where(own == last, total - sums, -float("inf")))
        key = load_transposed(k + (head // GROUPS) * K, first, HEADS // GROUPS * K, token, channel, K, inside)
        carried = carried * tl.where(last == incoming, tl.exp(total), 0.0)
        carried += tl.dot(key, (values * to_end[:, None]).to(key.dtype), input_precision=PRECISION)
        incoming = last
    if result is not None:
        last_at, is_state = tile_of_state(result, row * HEADS + head, channel, column, K, V)
        tl.store(last_at, carried, mask=is_state)


# fmt: off
@cache_launches
@triton.jit(do_not_specialize=["length", "chunks"])
def compute_results(
    q, k, written, states, decays, ids, before, result, length, chunks, HEADS: tl.constexpr, GROUPS: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):
    # fmt: on
    """Store the results for one chunk, head and value block, from the incoming state and the written values."""
    # A program computes the results e Q S + (Q K^T D) N for one chunk, head and block of BV columns.
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    number = tl.program_id(0) // BLOCKS
    row, chunk, first, inside = locate_chunk(number, length, chunks, CHUNK)
    head = tl.program_id(1)
    own, incoming, _last, _end = load_document_borders(ids, before, row, chunk, first, inside, length, CHUNK)
    token, channel = tl.arange(0, CHUNK), tl.arange(0, BK)
    column = tl.program_id(0) % BLOCKS * BV + tl.arange(0, BV)
    sums = tl.load(decays + (first + token) * HEADS + head, mask=inside, other=0.0)
    query = load_tile(q + (head // GROUPS) * K, first, HEADS // GROUPS * K, token, channel, K, inside)
    key = load_transposed(k + (head // GROUPS) * K, first, HEADS // GROUPS * K, token, channel, K, inside)
    at, is_state = tile_of_state(states, number * HEADS + head, channel, column, K, V)
    state = tl.load(at, mask=is_state, other=0.0)
    from_state = tl.where(own == incoming, tl.exp(sums), 0.0)
    mixed = from_state[:, None] * tl.dot(query, state, input_precision=PRECISION)
    is_pair = mask_document_pairs(own, inside, CHUNK)
    pair_decay = tl.exp(tl.where(is_pair, sums[:, None] - sums[None, :], -float("inf")))
    scores = tl.dot(query, key, input_precision=PRECISION) * pair_decay
    values = load_tile(written + head * V, first, HEADS * V, token, column, V, inside)
    mixed += tl.dot(scores.to(values.dtype), values, input_precision=PRECISION)
    store_tile(result + head * V, first, HEADS * V, token, column, V, inside, mixed)


# fmt: off
@cache_launches
@triton.jit(do_not_specialize=["length", "chunks"])
def compute_grad_written(
    grad, q, k, decays, ids, grad_written, length, chunks, HEADS: tl.constexpr, GROUPS: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):
    # fmt: on
    """Store the part of the written values' gradient that comes from results in the same chunk."""
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    _row, _chunk, first, inside = locate_chunk(tl.program_id(0) // BLOCKS, length, chunks, CHUNK)
    head = tl.program_id(1)
    token, channel = tl.arange(0, CHUNK), tl.arange(0, BK)
    column = tl.program_id(0) % BLOCKS * BV + tl.arange(0, BV)
    own = tl.load(ids + first + token, mask=inside, other=-2)
    sums = tl.load(decays + (first + token) * HEADS + head, mask=inside, other=0.0)
    query = load_transposed(q + (head // GROUPS) * K, first, HEADS // GROUPS * K, token, channel, K, inside)
    key = load_tile(k + (head // GROUPS) * K, first, HEADS // GROUPS * K, token, channel, K, inside)
    # By key and query: the transpose of the scores.
    is_pair = (own[:, None] == own[None, :]) & (token[:, None] <= token[None, :]) & inside[:, None]
    pair_decay = tl.exp(tl.where(is_pair, sums[None, :] - sums[:, None], -float("inf")))
    scores = tl.dot(key, query, input_precision=PRECISION) * pair_decay
    grads = load_tile(grad + head * V, first, HEADS * V, token, column, V, inside)
    product = tl.dot(scores.to(grads.dtype), grads, input_precision=PRECISION)
    store_tile(grad_written + head * V, first, HEADS * V, token, column, V, inside, product)


# fmt: off
@cache_launches
@triton.jit(do_not_specialize=["length", "chunks"])
def carry_gradients_back(
    grad, grad_last, q, k, keys, decays, ids, before, grad_written, grad_states, grad_state, length, chunks,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):
    # fmt: on
    """Pass the state's gradient back through a row's chunks, and complete the written values' gradients."""
    row, head = tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    token, channel = tl.arange(0, CHUNK), tl.arange(0, BK)
    column = tl.program_id(0) * BV + tl.arange(0, BV)
    last_at, is_state = tile_of_state(grad_last, row * HEADS + head, channel, column, K, V)
    carried = tl.load(last_at, mask=is_state, other=0.0).to(tl.float32)
    for back in range(0, chunks):
        chunk = chunks - 1 - back
        at, is_state = tile_of_state(grad_states, (row * chunks + chunk) * HEADS + head, channel, column, K, V)
        narrow = carried.to(grad_states.dtype.element_ty)
        tl.store(at, narrow, mask=is_state)
        first = row.to(tl.int64) * length + chunk * CHUNK
        inside = chunk * CHUNK + token < length
        own, incoming, last, end = load_document_borders(ids, before, row, chunk, first, inside, length, CHUNK)
        sums = tl.load(decays + (first + token) * HEADS + head, mask=inside, other=0.0)
        total = tl.load(decays + (first + end) * HEADS + head)
        to_end = tl.exp(tl.where(own == last, total - sums, -float("inf")))
        from_state = tl.where(own == incoming, tl.exp(sums), 0.0)
        key = load_tile(k + (head // GROUPS) * K, first, HEADS // GROUPS * K, token, channel, K, inside)
        values = load_tile(grad_written + head * V, first, HEADS * V, token, column, V, inside).to(tl.float32)
        values += to_end[:, None] * tl.dot(key, narrow, input_precision=PRECISION)
        store_tile(grad_written + head * V, first, HEADS * V, token, column, V, inside, values)
        query = load_transposed(q + (head // GROUPS) * K, first, HEADS // GROUPS * K, token, channel, K, inside)
        seen = load_transposed(keys + head * K, first, HEADS * K, token, channel, K, inside)
        grads = load_tile(grad + head * V, first, HEADS * V, token, column, V, inside).to(tl.float32)
        carried = carried * tl.where(last == incoming, tl.exp(total), 0.0)
        carried += tl.dot(query, (from_state[:, None] * grads).to(query.dtype), input_precision=PRECISION)
        carried -= tl.dot(seen, values.to(seen.dtype), input_precision=PRECISION)
    if grad_state is not None:
        first_at, is_state = tile_of_state(grad_state, row * HEADS + head, channel, column, K, V)
        tl.store(first_at, carried, mask=is_state)


# fmt: off
@cache_launches
@triton.jit(do_not_specialize=["length", "chunks"])
def compute_product_gradients(
    grad, q, k, written, states, grad_states, decays, ids, before, grad_q, grad_k, grad_decays, length, chunks,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):
    # fmt: on
    """Store query, key and decay gradients from the results and the passed states, by chunk and head."""
    row, chunk, first, inside = locate_chunk(tl.program_id(0), length, chunks, CHUNK)
    head = tl.program_id(1)
    own, incoming, last, end = load_document_borders(ids, before, row, chunk, first, inside, length, CHUNK)
    token, channel = tl.arange(0, CHUNK), tl.arange(0, BK)
    to_query, to_key = tl.zeros((CHUNK, BK), tl.float32), tl.zeros((CHUNK, BK), tl.float32)
    by_query, by_key = tl.zeros((CHUNK, CHUNK), tl.float32), tl.zeros((CHUNK, CHUNK), tl.float32)
    along = tl.zeros((BK, BV), tl.float32)
    for begin in range(0, V, BV):
        column = begin + tl.arange(0, BV)
        number = tl.program_id(0) * HEADS + head
        at, is_state = tile_of_state(states, number, channel, column, K, V)
        state = tl.load(at, mask=is_state, other=0.0)
        at, is_state = tile_of_state(grad_states, number, channel, column, K, V)
        grad_state = tl.load(at, mask=is_state, other=0.0)
        grads = load_tile(grad + head * V, first, HEADS * V, token, column, V, inside)
        values = load_tile(written + head * V, first, HEADS * V, token, column, V, inside)
        to_query += tl.dot(grads, tl.trans(state), input_precision=PRECISION)
        to_key += tl.dot(values, tl.trans(grad_state), input_precision=PRECISION)
        by_query += tl.dot(grads, tl.trans(values), input_precision=PRECISION)
        by_key += tl.dot(values, tl.trans(grads), input_precision=PRECISION)
        along += state.to(tl.float32) * grad_state.to(tl.float32)
    sums = tl.load(decays + (first + token) * HEADS + head, mask=inside, other=0.0)
    total = tl.load(decays + (first + end) * HEADS + head)
    to_end = tl.exp(tl.where(own == last, total - sums, -float("inf")))
    from_state = tl.where(own == incoming, tl.exp(sums), 0.0)
    to_query *= from_state[:, None]
    to_key *= to_end[:, None]
    query = load_tile(q + (head // GROUPS) * K, first, HEADS // GROUPS * K, token, channel, K, inside)
    key = load_tile(k + (head // GROUPS) * K, first, HEADS // GROUPS * K, token, channel, K, inside)
    from_end = tl.sum(to_key * key.to(tl.float32), 1)
    grad_sums = tl.sum(to_query * query.to(tl.float32), 1) - from_end
    is_pair = mask_document_pairs(own, inside, CHUNK)
    by_query *= tl.exp(tl.where(is_pair, sums[:, None] - sums[None, :], -float("inf")))
    is_pair = (own[:, None] == own[None, :]) & (token[:, None] <= token[None, :]) & inside[:, None]
    by_key *= tl.exp(tl.where(is_pair, sums[None, :] - sums[:, None], -float("inf")))
    through_pairs = by_query * tl.dot(query, tl.trans(key), input_precision=PRECISION)
    grad_sums += tl.sum(through_pairs, 1) - tl.sum(through_pairs, 0)
    state_decay = tl.where(last == incoming, tl.exp(total), 0.0)
    at_end = tl.sum(from_end, 0) + state_decay * tl.sum(tl.sum(along, 1), 0)
    grad_sums += tl.where(token == end, at_end, 0.0)
    tl.store(grad_decays + (first + token) * HEADS + head, grad_sums, mask=inside)
    to_query += tl.dot(by_query.to(key.dtype), key, input_precision=PRECISION)
    to_key += tl.dot(by_key.to(query.dtype), query, input_precision=PRECISION)
    store_tile(grad_q + head * K, first, HEADS * K, token, channel, K, inside, to_query)
    store_tile(grad_k + head * K, first, HEADS * K, token, channel, K, inside, to_key)


# fmt: off
@cache_launches
@triton.jit(do_not_specialize=["length", "chunks"])
def compute_system_gradients(
    k, v, beta, inverse, written, states, grad_written, decays, ids, before, partial_k, grad_decays, pairs, grad_k,
    grad_v, grad_g, grad_beta, length, chunks, HEADS: tl.constexpr, GROUPS: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):
    # fmt: on
    """Store the gradients that pass through the solved systems: keys, values, gates and beta."""
    row, chunk, first, inside = locate_chunk(tl.program_id(0), length, chunks, CHUNK)
    head = tl.program_id(1)
    own, incoming, _last, _end = load_document_borders(ids, before, row, chunk, first, inside, length, CHUNK)
    token, channel = tl.arange(0, CHUNK), tl.arange(0, BK)
    by_head = (first + token) * HEADS + head
    factors = tl.load(beta + by_head, mask=inside, other=0.0).to(tl.float32)
    solved = load_transposed(inverse + head * CHUNK, first, HEADS * CHUNK, token, token, CHUNK, inside)
    through_state = tl.zeros((CHUNK, BK), tl.float32)
    by_pair = tl.zeros((CHUNK, CHUNK), tl.float32)
    grad_factors = tl.zeros((CHUNK,), tl.float32)
    for begin in range(0, V, BV):
        column = begin + tl.arange(0, BV)
        grads = load_tile(grad_written + head * V, first, HEADS * V, token, column, V, inside)
        wanted = tl.dot(solved, grads, input_precision=PRECISION)
        store_tile(grad_v + head * V, first, HEADS * V, token, column, V, inside, factors[:, None] * wanted)
        values = load_tile(v + head * V, first, HEADS * V, token, column, V, inside).to(tl.float32)
        grad_factors += tl.sum(wanted * values, 1)
        values = load_tile(written + head * V, first, HEADS * V, token, column, V, inside)
        at, is_state = tile_of_state(states, tl.program_id(0) * HEADS + head, channel, column, K, V)
        state = tl.load(at, mask=is_state, other=0.0)
        narrow = wanted.to(values.dtype)
        by_pair -= tl.dot(narrow, tl.trans(values), input_precision=PRECISION)
        through_state -= tl.dot(narrow, tl.trans(state), input_precision=PRECISION)
    sums = tl.load(decays + by_head, mask=inside, other=0.0)
    from_state = tl.where(own == incoming, tl.exp(sums), 0.0)
    key = load_tile(k + (head // GROUPS) * K, first, HEADS // GROUPS * K, token, channel, K, inside)
    is_pair = mask_document_pairs(own, inside, CHUNK)
    pair_decay = tl.exp(tl.where(is_pair, sums[:, None] - sums[None, :], -float("inf")))
    by_pair = tl.where(token[:, None] > token[None, :], by_pair * pair_decay, 0.0)
    through_pairs = by_pair * tl.dot(key, tl.trans(key), input_precision=PRECISION)
    along = from_state * tl.sum(through_state * key.to(tl.float32), 1)
    grad_factors += along + tl.sum(through_pairs, 1)
    tl.store(grad_beta + by_head, grad_factors.to(grad_beta.dtype.element_ty), mask=inside)
    through_pairs *= factors[:, None]
    grad_sums = tl.load(grad_decays + by_head, mask=inside, other=0.0)
    grad_sums += factors * along + tl.sum(through_pairs, 1) - tl.sum(through_pairs, 0)
    grad_gates = tl.sum(tl.where(is_pair, grad_sums[:, None], 0.0), 0)
    tl.store(grad_g + by_head, grad_gates.to(grad_g.dtype.element_ty), mask=inside)
    by_pair *= factors[:, None]
    # Through memory, which transposes.
    store_tile(pairs + head * CHUNK, first, HEADS * CHUNK, token, token, CHUNK, inside, by_pair)
    tl.debug_barrier()
    transposed = load_transposed(pairs + head * CHUNK, first, HEADS * CHUNK, token, token, CHUNK, inside)
    total = load_tile(partial_k + head * K, first, HEADS * K, token, channel, K, inside)
    total += (factors * from_state)[:, None] * through_state
    total += tl.dot(by_pair.to(key.dtype), key, input_precision=PRECISION)
    total += tl.dot(transposed, key, input_precision=PRECISION)
    store_tile(grad_k + head * K, first, HEADS * K, token, channel, K, inside, total)


# fmt: off
@cache_launches
@triton.jit(do_not_specialize=["count"])
def sum_groups_kernel(grad, result, count, GROUPS: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, SIZE: tl.constexpr):
    # fmt: on
    """Store the sum of gradients over value heads with a common key head."""
    key_head = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    channel, inside = tl.arange(0, BK), key_head < count
    total = tl.zeros((SIZE, BK), tl.float32)
    for number in tl.static_range(GROUPS):
        total += load_tile(grad + number * K, 0, GROUPS * K, key_head, channel, K, inside).to(tl.float32)
    store_tile(result, 0, K, key_head, channel, K, inside, total)
