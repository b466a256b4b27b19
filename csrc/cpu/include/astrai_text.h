/* The C interface of the merger: SentencePiece's BPE over a vocabulary, with the control tokens in the text found first. No
 * part of the kernels but of their library. Mirrored in runtime/astrai_runtime/text/_merger.py. Nothing throws.
 *
 * All texts are UTF-8. A vocabulary's texts come packed, as GGUF files hold them: for each id in order its length in bytes as
 * uint64_t, little-endian, and then the bytes.
 */
#ifndef ASTRAI_TEXT_H
#define ASTRAI_TEXT_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

#define ASTRAI_TEXT_ABI 1

/* tokenizer.ggml.token_type of the tokens that are found in a text before anything is merged */
enum { ASTRAI_TOKEN_UNKNOWN = 2, ASTRAI_TOKEN_CONTROL = 3, ASTRAI_TOKEN_USER_DEFINED = 4 };

typedef struct astrai_merger astrai_merger;

typedef struct astrai_vocabulary {
    const uint8_t *texts;       /* packed */
    int64_t n_text_bytes;
    const uint8_t *types;       /* one byte a token */
    const uint32_t *merges;     /* left, right and the token that they become; the first ones happen first */
    int32_t n_tokens;
    int32_t n_merges;
    int32_t unknown;            /* stands for any number of characters that are no tokens; -1: they are left out */
    int32_t byte_fallback;      /* 1: such characters become the tokens <0x00> to <0xFF>, where all of them exist */
    int32_t space_prefix;       /* 1: every piece of text between control tokens begins with a space */
} astrai_vocabulary;

int32_t astrai_text_abi(void);

/* Copies what it needs; no two tokens may have the same text. NULL: texts and merges do not fit together, a text is not UTF-8,
 * or there is not enough memory. */
astrai_merger *astrai_merger_open(const astrai_vocabulary *);
void astrai_merger_close(astrai_merger *);

/* The ids of a text of n bytes in memory that astrai_merger_free takes back; their number is returned, -1: not enough memory.
 * special 0: control and unknown tokens that the text spells stay text. Safe to call from several threads at once. */
int64_t astrai_merger_encode(const astrai_merger *, const char *text, int64_t n, int32_t special, uint32_t **ids);
void astrai_merger_free(uint32_t *ids);

/* The text of a token and its length in bytes; it ends with the merger. */
const char *astrai_merger_text(const astrai_merger *, int32_t id, int64_t *n);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
