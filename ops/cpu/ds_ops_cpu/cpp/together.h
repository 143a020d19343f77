// Work that is done while more of it is being prepared.
//
// A step over a thousand small tensors asks Python a good deal of each, for a third of the time that the step itself
// takes on two threads. So Python, on one thread, hands out the step in portions, and the other threads begin with the
// first of them at once; when all is handed out, that thread takes part too.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>

namespace ds {

class Together {
  public:
    using Piece = std::function<void()>;

    // The one to which this thread hands out work, if any.
    static Together*& current() {
        static thread_local Together* here = nullptr;
        return here;
    }

    void give(Piece piece) {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            pieces_.push_back(std::move(piece));
        }
        news_.notify_one();
    }

    void close() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            closed_ = true;
        }
        news_.notify_all();
    }

    // Takes pieces until there are none and no more will come.
    void work() {
        std::unique_lock<std::mutex> lock(mutex_);
        while (true) {
            news_.wait(lock, [&] { return closed_ || !pieces_.empty(); });
            if (pieces_.empty()) return;
            const Piece piece = std::move(pieces_.front());
            pieces_.pop_front();
            lock.unlock();
            piece();
            lock.lock();
        }
    }

  private:
    std::mutex mutex_;
    std::condition_variable news_;
    std::deque<Piece> pieces_;
    bool closed_ = false;
};

}  // namespace ds
