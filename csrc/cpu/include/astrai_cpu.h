/* The C interface of the CPU kernels. Everything that crosses it is a number, a pointer or a plain struct: no C++ type, no
 * Python, no torch. Mirrored field by field in runtime/astrai_runtime/kernels/_abi.py; ASTRAI_CPU_ABI changes with it.
 *
 * Shapes: T tokens in a step, B sequences, S rows of logits, C hidden size, H query heads, K key/value heads, D head size,
 * F width of the MLP, V vocabulary, N token slots in the KV pool.
 *
 * Functions that can fail return NULL or a number other than 0 and leave a sentence in astrai_error(). Nothing throws.
 */
#ifndef ASTRAI_CPU_H
#define ASTRAI_CPU_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

#define ASTRAI_CPU_ABI 1

/* How a matrix or the KV pool is stored. */
enum { ASTRAI_FLOAT32 = 0, ASTRAI_BFLOAT16 = 1, ASTRAI_INT8 = 2, ASTRAI_INT4 = 3 };

/* What astrai_pack reads: rows of plain numbers, or of ggml's blocks (ggml-common.h of llama.cpp). */
enum {
    ASTRAI_FROM_FLOAT32 = 0, ASTRAI_FROM_BFLOAT16 = 1, ASTRAI_FROM_FLOAT16 = 2,
    ASTRAI_FROM_Q8_0 = 8, ASTRAI_FROM_Q4_0 = 4, ASTRAI_FROM_Q4_1 = 5, ASTRAI_FROM_Q5_0 = 6, ASTRAI_FROM_Q5_1 = 7,
    ASTRAI_FROM_Q4_K = 12, ASTRAI_FROM_Q5_K = 13, ASTRAI_FROM_Q6_K = 14,
};

enum { ASTRAI_SILU = 0, ASTRAI_GELU_TANH = 1 };

/* A packed matrix [rows, cols], y = W x. Rows are padded to whole tiles of 16 and columns to whole groups of 32; the padding
 * has scale 0 (quantised) or value 0. `data` is aligned to 64 bytes. With G groups, g a group, r a row of the tile:
 *   FLOAT32   float    data[tile][col][r]
 *   BFLOAT16  uint16_t data[tile][col / 2][r][col % 2]
 *   INT8      uint8_t  data[tile][g][k / 4][r][k % 4]            k = col % 32; the byte is the weight + 128
 *   INT4      uint8_t  data[tile][g][k / 4 % 4][r][k % 4]        k < 16 in the low nibble, k >= 16 in the high one
 *   scales    float16  [tile][g][r]                              INT8, INT4: weight = scale * (code - 128 or 8) + offset
 *   offsets   float16  [tile][g][r] or NULL (0 everywhere)       INT4 only
 */
typedef struct astrai_matrix {
    int32_t format;
    int32_t rows;
    int32_t cols;
    int32_t reserved;
    void *data;
    uint16_t *scales;
    uint16_t *offsets;
} astrai_matrix;

/* One decoder layer. Norm weights are float32 with the norm's offset added already; NULL where the model has none. */
typedef struct astrai_layer {
    int32_t n_heads;
    int32_t n_kv_heads;
    int32_t head_dim;      /* a multiple of 16 */
    int32_t intermediate;  /* F; in gate_up the gate has rows 0..F and up begins at F rounded up to 16 */
    int32_t window;        /* tokens that a query sees, itself included; 0: all */
    int32_t activation;
    int32_t rope;          /* index into astrai_decoder.frequencies */
    float scale;           /* of the attention scores */
    const float *attn_norm, *mlp_norm;            /* [C] */
    const float *post_attn_norm, *post_mlp_norm;  /* [C] or NULL */
    const float *q_norm, *k_norm;                 /* [D] or NULL */
    const float *qkv_bias, *o_bias, *gate_up_bias, *down_bias; /* as many as the matrix has padded rows, or NULL */
    astrai_matrix qkv;     /* [(H + 2 K) D, C] */
    astrai_matrix o;       /* [C, H D] */
    astrai_matrix gate_up; /* [2 F padded, C] */
    astrai_matrix down;    /* [C, F] */
} astrai_layer;

/* A decoder. What it points at must outlive the program that was opened on it. */
typedef struct astrai_decoder {
    int32_t hidden;
    int32_t vocab;
    int32_t n_layers;
    int32_t n_ropes;
    int32_t kv_format;     /* FLOAT32 or BFLOAT16 */
    float norm_eps;
    float embedding_scale;
    int32_t reserved;
    const float *final_norm;
    astrai_matrix embed;   /* [V, C]; rows are looked up */
    astrai_matrix head;    /* [V, C]; the same pointers as embed when tied */
    const astrai_layer *layers;
    const float *const *frequencies; /* per rope [D / 2]: radians a position */
    const float *rope_factors;       /* per rope: what cosine and sine are multiplied by */
} astrai_decoder;

/* Where keys and values lie. Token slot s is lane s % 16 of block s / 16. Per layer and block, K heads one after the other:
 *   FLOAT32   k float [D][16]               v float [16][D]
 *   BFLOAT16  k uint16_t [D / 2][16][2]     v uint16_t [8][D][2]   (pairs of tokens)
 * Slots of consecutive positions may lie anywhere; 16 aligned positions in one block are the fast case.
 */
typedef struct astrai_kv {
    void *k;
    void *v;
    int64_t layer_stride;    /* bytes from one layer to the next, the same for k and v */
    const int32_t *table;    /* slot of each position of each row */
    int64_t table_stride;    /* entries from one row to the next */
} astrai_kv;

/* One step: any mix of decoding and prompt tokens. Slots of all its tokens are in the table already. */
typedef struct astrai_step {
    int32_t n_tokens;        /* T */
    int32_t n_sequences;     /* B */
    int32_t n_logits;        /* S */
    int32_t reserved;
    const int32_t *token_ids;    /* [T] */
    const int32_t *positions;    /* [T] */
    const int32_t *starts;       /* [B + 1]: where each sequence's tokens begin among the T; they are consecutive positions */
    const int32_t *rows;         /* [B]: row of the table */
    const int32_t *logit_rows;   /* [S]: indices into the T tokens, ascending */
    float *logits;               /* [S, logits_stride], V padded to 16 are written */
    int64_t logits_stride;       /* at least V rounded up to 16 */
    astrai_kv kv;
} astrai_step;

typedef struct astrai_pool astrai_pool;
typedef struct astrai_program astrai_program;

/* The last failure of this thread, "" when there was none. */
const char *astrai_error(void);
int32_t astrai_abi(void);

/* Instruction sets of this library, best first, separated by spaces; and those of them that this CPU has. */
const char *astrai_built_for(void);
const char *astrai_runs_here(void);

/* `threads` workers, the caller counted. Idle ones spin for `spin_us` microseconds, then sleep. */
astrai_pool *astrai_pool_open(int32_t threads, int32_t spin_us);
void astrai_pool_close(astrai_pool *);

/* Zeroed memory in huge pages where the kernel has some, aligned to 64 bytes and more. */
void *astrai_allocate(int64_t bytes);
void astrai_free(void *, int64_t bytes);

/* Packs n_rows rows of `source`, `row_bytes` apart, as rows first_row.. of a matrix whose memory is zeroed. */
int32_t astrai_pack(astrai_pool *, const astrai_matrix *, int32_t from, const void *source, int64_t row_bytes,
                    int32_t first_row, int32_t n_rows);
/* Rows of a packed matrix as float32 [n, cols]. */
int32_t astrai_unpack(const astrai_matrix *, const int32_t *rows, int32_t n, float *out);

/* The whole decoder. `isa` is one of astrai_runs_here(). Scratch memory grows with the largest step and is kept. */
astrai_program *astrai_program_open(const char *isa, const astrai_decoder *, astrai_pool *, int32_t max_tokens, int32_t max_logits);
void astrai_program_close(astrai_program *);
int32_t astrai_program_run(astrai_program *, const astrai_step *);
int64_t astrai_program_bytes(const astrai_program *); /* scratch memory held now */

/* Seconds spent in the parts of all steps so far, for profiles: ASTRAI_PARTS numbers; zeroed by reading. */
#define ASTRAI_PARTS 8 /* embed, qkv, rope + store, attention, o, gate/up, down, head */
void astrai_program_profile(astrai_program *, double *seconds);

/* Single kernels, for tests and benchmarks. x [rows, cols] float32. */
int32_t astrai_matmul(const char *isa, astrai_pool *, const astrai_matrix *, const float *x, int32_t rows, const float *bias,
                      float *y, int64_t y_stride);
/* Stores k and v [T, K, D] and attends: out [T, H, D]. Norms and rotation have been applied. */
int32_t astrai_attention(const char *isa, astrai_pool *, const astrai_layer *, int32_t kv_format, int32_t layer_index,
                         const astrai_step *, const float *q, const float *k, const float *v, float *out);
int32_t astrai_rms_norm(const char *isa, const float *x, const float *weight, int32_t rows, int32_t cols, float eps, float *out);

/* Sampling */

/* What may be done to a row before its token is chosen, in the order in which it is listed. */
enum {
    ASTRAI_PENALTIES = 0,   /* values: repetition, frequency, presence; see astrai_choice.tokens */
    ASTRAI_LOGIT_BIAS = 1,  /* adds values[i] to the logit of ids[i]; -100 removes it, 100 removes all that have less */
    ASTRAI_TEMPERATURE = 2, /* value > 0 divides */
    ASTRAI_TOP_K = 3,       /* keeps so many, ties by lowest id */
    ASTRAI_TOP_P = 4,       /* keeps the fewest that hold this share, at least one */
    ASTRAI_MIN_P = 5,       /* keeps those with at least this share of the best one's */
};

typedef struct astrai_operation {
    int32_t kind;
    int32_t n;             /* ids */
    double value;
    const int32_t *ids;    /* no id twice */
    const float *values;
} astrai_operation;

/* One row of logits, V float32 that are edited in place, and what to do with it. */
typedef struct astrai_choice {
    float *logits;
    const astrai_operation *operations;
    const int32_t *tokens;    /* for penalties: the prompt's, then the generated ones */
    int32_t n_operations;
    int32_t n_tokens;
    int32_t n_prompt;
    int32_t token;            /* out: the choice; -1: the row holds NaN or +infinity, or no number; -2: all was removed */
    double u;                 /* below 0: the largest logit, lowest id on ties; in [0, 1): the token whose share, in order of id,
                                 contains it */
} astrai_choice;

typedef struct astrai_sampler astrai_sampler;

/* For rows of `vocab` logits. Its scratch memory is bounded by them and by the largest number of rows. */
astrai_sampler *astrai_sampler_open(const char *isa, astrai_pool *, int32_t vocab);
void astrai_sampler_close(astrai_sampler *);
int32_t astrai_sampler_choose(astrai_sampler *, astrai_choice *rows, int32_t n);
/* The k largest of one row, largest first and ties by lowest id, and the logarithm of the sum of its exponentials: NaN, and
 * nothing else, when the row holds NaN or +infinity. */
int32_t astrai_sampler_likeliest(astrai_sampler *, const float *logits, int32_t k, int32_t *ids, float *values, double *log_sum);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
