// Recorded calls made again, and what moves numbers between them.
#include <cstdint>
#include <cstring>

struct Call {
    void (*function)(const void *);
    const void *arguments;
};

struct Calls {
    const Call *first;
    int64_t count;
};

extern "C" void replay(const Calls *calls) {
    for (const Call *call = calls->first; call < calls->first + calls->count; call++) call->function(call->arguments);
}

struct Move {  // rows of `size` bytes each, that lie this many bytes apart
    const char *from;  // null: zeros
    char *to;
    int64_t rows, size, from_row, to_row;
};

extern "C" void move(const Move *move) {
    const Move &m = *move;
    for (int64_t r = 0; r < m.rows; r++)
        m.from ? (void)memcpy(m.to + r * m.to_row, m.from + r * m.from_row, m.size)
               : (void)memset(m.to + r * m.to_row, 0, m.size);
}

struct Take {  // numbers from these places, to those
    const int64_t *from, *from_places, *to_places;
    int64_t *to;
    int64_t count;
};

extern "C" void take(const Take *take) {
    const Take &t = *take;
    for (int64_t i = 0; i < t.count; i++) t.to[t.to_places[i]] = t.from[t.from_places[i]];
}
