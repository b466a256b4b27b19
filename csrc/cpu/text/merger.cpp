// SentencePiece's BPE: the best pair of neighbours merges first, leftmost on ties, until no pair is a piece.
//
// The order of operations and the treatment of unknown characters are those of Hugging Face's `tokenizers` (models/bpe/word.rs,
// added_vocabulary.rs), which serves where this library does not: both give the same ids for every text.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <queue>
#include <string_view>
#include <vector>

#include "include/astrai_text.h"

namespace {

constexpr uint32_t none = UINT32_MAX;
constexpr std::string_view space_mark = "\xE2\x96\x81";

// Bytes of the character that begins with `byte`; 0: none does.
size_t char_bytes(uint8_t byte) {
    if (byte < 0x80) return 1;
    if (byte < 0xC2) return 0;
    return byte < 0xE0 ? 2 : byte < 0xF0 ? 3 : byte < 0xF5 ? 4 : 0;
}

// One character of valid UTF-8 as a number that no other character has: its bytes.
uint32_t char_key(std::string_view bytes) {
    uint32_t key = 0;
    for (char byte : bytes) key = key << 8 | uint8_t(byte);
    return key;
}

bool is_utf8(std::string_view text) {
    for (size_t at = 0; at < text.size();) {
        const size_t n = char_bytes(uint8_t(text[at]));
        if (n == 0 || at + n > text.size()) return false;
        for (size_t i = 1; i < n; ++i) {
            if ((uint8_t(text[at + i]) & 0xC0) != 0x80) return false;
        }
        at += n;
    }
    return true;
}

// Keys to two numbers each, in one block of memory; every key is less than 2^64 - 1.
class Table {
  public:
    struct Entry {
        uint64_t key = UINT64_MAX;
        uint32_t first = none, second = none;
    };

    explicit Table(size_t n) {
        size_t size = 16;  // a power of two, at most half of it taken
        while (size < n * 2) size *= 2, --shift_;
        entries_.resize(size);
    }
    void put(uint64_t key, uint32_t first, uint32_t second) { entries_[place(key)] = {key, first, second}; }
    // The entry, or one with `none` in both places.
    const Entry &get(uint64_t key) const { return entries_[place(key)]; }

  private:
    size_t place(uint64_t key) const {
        size_t at = size_t(key * 0x9E3779B97F4A7C15u >> shift_);
        while (entries_[at].key != key && entries_[at].key != UINT64_MAX) at = (at + 1) & (entries_.size() - 1);
        return at;
    }
    std::vector<Entry> entries_;
    int shift_ = 60;
};

// The tokens that are found in a text before merging, as a tree of bytes.
class Found {
  public:
    void add(std::string_view text, uint32_t id) {
        uint32_t at = 0;
        for (char byte : text) {
            uint32_t *child = &nodes_[at].child;
            while (*child != none && nodes_[*child].byte != uint8_t(byte)) child = &nodes_[*child].sibling;
            if (*child == none) {
                const uint32_t made = uint32_t(nodes_.size());
                *child = made;  // before the vector moves
                nodes_.push_back({});
                nodes_.back().byte = uint8_t(byte);
                at = made;
            } else {
                at = *child;
            }
        }
        nodes_[at].id = id;
    }
    // Every first byte of a token is marked: most places of a text begin none.
    void finish() {
        for (uint32_t at = nodes_[0].child; at != none; at = nodes_[at].sibling) first_[nodes_[at].byte] = at;
    }
    // The longest token at the beginning of `text`, and its length; `none` where there is none.
    uint32_t longest(std::string_view text, size_t &length) const {
        uint32_t found = none;
        uint32_t at = first_[uint8_t(text[0])];
        for (size_t n = 1; at != none; ++n) {
            if (nodes_[at].id != none) found = nodes_[at].id, length = n;
            if (n == text.size()) break;
            at = nodes_[at].child;
            while (at != none && nodes_[at].byte != uint8_t(text[n])) at = nodes_[at].sibling;
        }
        return found;
    }
    Found() { std::fill(std::begin(first_), std::end(first_), none); }

  private:
    struct Node {
        uint32_t child = none, sibling = none, id = none;
        uint8_t byte = 0;
    };
    std::vector<Node> nodes_{Node{}};
    uint32_t first_[256];
};

struct Symbol {
    uint32_t id;
    int32_t before, after;  // neighbours; -1: none
};

struct Merge {
    uint32_t rank;
    int32_t at;
    uint32_t made;
    bool operator<(const Merge &other) const {  // for a queue whose top is the largest
        return rank != other.rank ? rank > other.rank : at > other.at;
    }
};

}  // namespace

struct astrai_merger {
    explicit astrai_merger(const astrai_vocabulary &given)
        : merges_(size_t(given.n_merges)), chars_(0), unknown_(given.unknown < 0 ? none : uint32_t(given.unknown)),
          space_prefix_(given.space_prefix != 0) {
        std::fill(std::begin(bytes_), std::end(bytes_), none);
    }

    // False: the parts do not fit together.
    bool read(const astrai_vocabulary &given) {
        const uint8_t *at = given.texts, *const end = given.texts + given.n_text_bytes;
        texts_.reserve(size_t(given.n_text_bytes));
        ends_.reserve(size_t(given.n_tokens));
        size_t n_chars = 0;
        for (int32_t id = 0; id < given.n_tokens; ++id) {
            uint64_t n;
            if (end - at < 8) return false;
            std::memcpy(&n, at, 8);
            at += 8;
            if (n > uint64_t(end - at)) return false;
            const std::string_view text(reinterpret_cast<const char *>(at), size_t(n));
            at += n;
            if (!is_utf8(text)) return false;
            texts_.insert(texts_.end(), text.begin(), text.end());
            ends_.push_back(uint32_t(texts_.size()));
            n_chars += !text.empty() && char_bytes(uint8_t(text[0])) == text.size();
        }
        if (at != end) return false;
        chars_ = Table(n_chars);
        for (uint32_t id = 0; id < ends_.size(); ++id) note(id, text(id), given);
        found_.finish();
        for (int32_t rank = 0; rank < given.n_merges; ++rank) {
            const uint32_t *merge = given.merges + 3 * size_t(rank);
            if (std::max({merge[0], merge[1], merge[2]}) >= ends_.size()) return false;
            merges_.put(pair(merge[0], merge[1]), uint32_t(rank), merge[2]);
        }
        return true;
    }

    std::string_view text(uint32_t id) const {
        const uint32_t begin = id == 0 ? 0 : ends_[id - 1];
        return {texts_.data() + begin, ends_[id] - begin};
    }

    // Leftmost tokens first, the longest of them at each place; what lies between them is merged.
    void encode(std::string_view text, bool special, std::vector<uint32_t> &ids) const {
        size_t begin = 0;
        for (size_t at = 0; at < text.size();) {
            size_t length = 0;
            const uint32_t id = found_.longest(text.substr(at), length);
            if (id == none) {
                ++at;
                continue;
            }
            if (special || types_[id] == ASTRAI_TOKEN_USER_DEFINED) {
                merge(text.substr(begin, at - begin), ids);
                ids.push_back(id);
                begin = at + length;
            }
            at += length;
        }
        merge(text.substr(begin), ids);
    }

  private:
    static uint64_t pair(uint32_t left, uint32_t right) { return uint64_t(left) << 32 | right; }

    // What a token is besides a piece: one character, one byte, or found before merging.
    void note(uint32_t id, std::string_view text, const astrai_vocabulary &given) {
        types_.push_back(given.types[id]);
        if (text.empty()) return;
        if (char_bytes(uint8_t(text[0])) == text.size()) chars_.put(char_key(text), id, none);
        if (given.byte_fallback && text.size() == 6 && text.substr(0, 3) == "<0x" && text[5] == '>') {
            const int high = digit(text[3]), low = digit(text[4]);
            if (high >= 0 && low >= 0) bytes_[high << 4 | low] = id;
        }
        const uint8_t type = given.types[id];
        if (type == ASTRAI_TOKEN_CONTROL || type == ASTRAI_TOKEN_UNKNOWN || type == ASTRAI_TOKEN_USER_DEFINED) {
            found_.add(text, id);
        }
    }

    static int digit(char hex) {
        return hex >= '0' && hex <= '9' ? hex - '0' : hex >= 'A' && hex <= 'F' ? hex - 'A' + 10 : -1;
    }

    // Symbols of one piece of text, and whether characters before the next one are unknown: they become one token.
    struct Word {
        std::vector<Symbol> symbols;
        bool unknown = false;

        void add(uint32_t id) {
            const int32_t at = int32_t(symbols.size());
            if (at > 0) symbols.back().after = at;
            symbols.push_back({id, at - 1, -1});
        }
    };

    void add_char(std::string_view bytes, Word &word) const {
        const uint32_t id = chars_.get(char_key(bytes)).first;
        if (id != none) {
            end_unknown(word);
            word.add(id);
            return;
        }
        const auto known = [this](char byte) { return bytes_[uint8_t(byte)] != none; };
        if (std::all_of(bytes.begin(), bytes.end(), known)) {
            for (char byte : bytes) word.add(bytes_[uint8_t(byte)]);
            return;
        }
        word.unknown = true;
    }

    void end_unknown(Word &word) const {
        if (word.unknown && unknown_ != none) word.add(unknown_);
        word.unknown = false;
    }

    void merge(std::string_view text, std::vector<uint32_t> &ids) const {
        if (text.empty()) return;
        Word word;
        word.symbols.reserve(text.size() + 3);
        if (space_prefix_) add_char(space_mark, word);
        for (size_t at = 0; at < text.size();) {
            const size_t n = std::max<size_t>(1, char_bytes(uint8_t(text[at])));
            add_char(text[at] == ' ' ? space_mark : text.substr(at, n), word);
            at += n;
        }
        end_unknown(word);
        if (word.symbols.empty()) return;
        run(word.symbols);
        for (int32_t at = 0; at >= 0; at = word.symbols[size_t(at)].after) ids.push_back(word.symbols[size_t(at)].id);
    }

    // The first symbol is never merged away: a merge keeps the left one.
    void run(std::vector<Symbol> &symbols) const {
        std::vector<Merge> first;
        first.reserve(symbols.size());
        for (size_t at = 0; at + 1 < symbols.size(); ++at) {
            const Table::Entry &merge = merges_.get(pair(symbols[at].id, symbols[at + 1].id));
            if (merge.first != none) first.push_back({merge.first, int32_t(at), merge.second});
        }
        std::priority_queue<Merge> waiting({}, std::move(first));
        const auto consider = [&](int32_t at) {
            if (at < 0 || symbols[size_t(at)].after < 0) return;
            const Symbol &left = symbols[size_t(at)], &right = symbols[size_t(left.after)];
            const Table::Entry &merge = merges_.get(pair(left.id, right.id));
            if (merge.first != none) waiting.push({merge.first, at, merge.second});
        };
        while (!waiting.empty()) {
            const Merge best = waiting.top();
            waiting.pop();
            Symbol &left = symbols[size_t(best.at)];
            if (left.id == none || left.after < 0) continue;  // merged away, or nothing is beside it any more
            Symbol &right = symbols[size_t(left.after)];
            if (merges_.get(pair(left.id, right.id)).second != best.made) continue;  // one of both is another one now
            left.id = best.made;
            left.after = right.after;
            right.id = none;
            if (left.after >= 0) symbols[size_t(left.after)].before = best.at;
            consider(left.before);
            consider(best.at);
        }
    }

    std::vector<char> texts_;
    std::vector<uint32_t> ends_;
    std::vector<uint8_t> types_;
    Table merges_, chars_;
    Found found_;
    uint32_t bytes_[256];
    uint32_t unknown_;
    bool space_prefix_;
};

extern "C" {

int32_t astrai_text_abi(void) { return ASTRAI_TEXT_ABI; }

astrai_merger *astrai_merger_open(const astrai_vocabulary *given) {
    try {
        auto made = std::make_unique<astrai_merger>(*given);
        return made->read(*given) ? made.release() : nullptr;
    } catch (const std::exception &) {
        return nullptr;
    }
}

void astrai_merger_close(astrai_merger *merger) { delete merger; }

int64_t astrai_merger_encode(const astrai_merger *merger, const char *text, int64_t n, int32_t special, uint32_t **ids) {
    try {
        std::vector<uint32_t> found;
        merger->encode({text, size_t(n)}, special != 0, found);
        *ids = static_cast<uint32_t *>(std::malloc(std::max<size_t>(1, found.size()) * sizeof(uint32_t)));
        if (*ids == nullptr) return -1;
        std::copy(found.begin(), found.end(), *ids);
        return int64_t(found.size());
    } catch (const std::exception &) {
        return -1;
    }
}

void astrai_merger_free(uint32_t *ids) { std::free(ids); }

const char *astrai_merger_text(const astrai_merger *merger, int32_t id, int64_t *n) {
    const std::string_view text = merger->text(uint32_t(id));
    *n = int64_t(text.size());
    return text.data();
}

}  // extern "C"
