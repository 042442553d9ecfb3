// Calls made in order by a thread of their own, while whoever submits them goes on: a CPU's counterpart of a stream.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
static void relax() { _mm_pause(); }
#else
static void relax() {}
#endif

struct Call {
    void (*function)(const void *);
    const void *arguments;
};

static const int64_t CAPACITY = 16;  // calls that wait or run
static const int LOOKS = 64;         // between two looks at the clock
static const auto PATIENCE = std::chrono::microseconds(500);  // a sleeper wakes too late for a step of a small model

class Stream {
  public:
    int64_t submit(Call call) {
        const int64_t number = submitted + 1;
        wait(number - CAPACITY);
        calls[number % CAPACITY] = call;
        submitted = number;
        wake();
        return number;
    }

    void wait(int64_t number) {
        wait_until([&] { return done >= number; });
    }

    void wait_for_all() { wait(submitted); }

    bool start() {  // signals are for the threads of the interpreter
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        try {
            thread = std::thread(&Stream::work, this);
        } catch (const std::system_error &) {
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        return thread.joinable();
    }

    void end() {  // what was submitted is done first
        stops = true;
        wake();
        thread.join();
    }

  private:
    void work() {
        for (;;) {
            wait_until([&] { return done < submitted || stops; });
            if (done == submitted) return;
            const Call &call = calls[(done + 1) % CAPACITY];
            call.function(call.arguments);
            done++;
            wake();
        }
    }

    template <class Condition> void wait_until(Condition met) {
        const auto deadline = std::chrono::steady_clock::now() + PATIENCE;
        do {
            for (int i = 0; i < LOOKS; i++) {
                if (met()) return;
                relax();
            }
            std::this_thread::yield();
        } while (std::chrono::steady_clock::now() < deadline);
        std::unique_lock<std::mutex> lock(mutex);
        sleepers++;
        changed.wait(lock, met);
        sleepers--;
    }

    void wake() {  // after what they wait for has changed: either they see it, or it is seen here that they sleep
        if (!sleepers) return;
        std::lock_guard<std::mutex> lock(mutex);
        changed.notify_all();
    }

    Call calls[CAPACITY];
    std::atomic<int64_t> submitted{0}, done{0};
    std::atomic<bool> stops{false};
    std::atomic<int> sleepers{0};
    std::mutex mutex;
    std::condition_variable changed;
    std::thread thread;
};

extern "C" Stream *make_stream() {  // null: the system has no thread for it
    Stream *stream = new Stream;
    if (stream->start()) return stream;
    delete stream;
    return nullptr;
}

extern "C" int64_t submit(Stream *stream, void (*function)(const void *), const void *arguments) {
    return stream->submit({function, arguments});
}

extern "C" void wait_for(Stream *stream, int64_t number) { stream->wait(number); }

extern "C" void wait_for_all(Stream *stream) { stream->wait_for_all(); }

// Once. Its memory stays: at the interpreter's end another thread may still be waiting there.
extern "C" void end_stream(Stream *stream) { stream->end(); }
