// A process that shares interprocess events with a test, and does with them what it is told.
#pragma once

#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <vector>

#include "workload.h"

namespace phos::test {

constexpr unsigned kFlags = CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING;
constexpr unsigned kStreams = 40;  // more than an event has counters

// Streams, each with a flag that its work can be made to wait for.
struct Streams {
    std::vector<CUstream> streams{kStreams};
    CUdeviceptr flags = 0;
    std::vector<unsigned> rounds = std::vector<unsigned>(kStreams);

    Streams() {
        OK(cuMemAlloc_v2(&flags, kStreams * 4));
        OK(cuMemsetD32_v2(flags, 0, kStreams));
        for (CUstream& stream : streams) OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    }
    void hold(unsigned i) {
        OK(cuStreamWaitValue32_v2(streams[i], flags + 4 * i, ++rounds[i],
                                  CU_STREAM_WAIT_VALUE_GEQ));
    }
    void let_go(unsigned i) { OK(cuMemsetD32_v2(flags + 4 * i, rounds[i], 1)); }
    // Whether all work comes to its end, which may take a busy machine long; and whether it does
    // not, for which a moment has to do.
    bool done(unsigned i) { return comes_to_its_end(i, 20000); }
    bool held(unsigned i) { return !comes_to_its_end(i, 5); }

  private:
    bool comes_to_its_end(unsigned i, int tries) {
        for (; tries; --tries, usleep(1000))
            if (cuStreamQuery(streams[i]) == CUDA_SUCCESS) return true;
        return false;
    }
};

// What the peer is asked to do with its event, and answers with a result.
struct Order {
    enum What {
        make,
        share,
        open,
        record,
        hold,
        let_go,
        wait,
        query,
        synchronize,
        destroy,
        done,
        held
    };
    What what;
    unsigned stream_number;
    CUipcEventHandle handle;
};
struct Answer {
    CUresult result;
    CUipcEventHandle handle;
};

inline void serve_events(int socket) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    start_workload();
    Streams mine;
    CUevent event = nullptr;
    Order order;
    while (read(socket, &order, sizeof order) == sizeof order) {
        const unsigned i = order.stream_number;
        Answer answer{};
        switch (order.what) {
            case Order::make:
                answer.result = cuEventCreate(&event, kFlags);
                break;
            case Order::share:
                answer.result = cuIpcGetEventHandle(&answer.handle, event);
                break;
            case Order::open:
                answer.result = cuIpcOpenEventHandle(&event, order.handle);
                break;
            case Order::record:
                answer.result = cuEventRecord(event, mine.streams[i]);
                break;
            case Order::hold:
                mine.hold(i);
                break;
            case Order::let_go:
                mine.let_go(i);
                break;
            case Order::wait:
                answer.result = cuStreamWaitEvent(mine.streams[i], event, 0);
                break;
            case Order::query:
                answer.result = cuEventQuery(event);
                break;
            case Order::synchronize:
                answer.result = cuEventSynchronize(event);
                break;
            case Order::destroy:
                answer.result = cuEventDestroy_v2(event);
                break;
            case Order::done:
                answer.result = mine.done(i) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
                break;
            case Order::held:
                answer.result = mine.held(i) ? CUDA_SUCCESS : CUDA_ERROR_UNKNOWN;
        }
        CHECK(write(socket, &answer, sizeof answer) == sizeof answer);
    }
    _exit(0);
}

class Peer {
  public:
    Peer() {
        int ends[2];
        CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
        pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) {
            close(ends[0]);
            serve_events(ends[1]);
        }
        close(ends[1]);
        socket_ = ends[0];
    }
    CUresult tell(Order::What what, unsigned stream = 0, CUipcEventHandle handle = {}) {
        const Order order{what, stream, handle};
        Answer answer;
        CHECK(write(socket_, &order, sizeof order) == sizeof order);
        CHECK(read(socket_, &answer, sizeof answer) == sizeof answer);
        shared = answer.handle;
        return answer.result;
    }
    CUevent opened() {
        CUevent event = nullptr;
        OK(tell(Order::share));
        OK(cuIpcOpenEventHandle(&event, shared));
        return event;
    }
    void end() {
        CHECK(kill(pid, SIGKILL) == 0 && waitpid(pid, nullptr, 0) == pid);
        close(socket_);
    }
    int pid;
    CUipcEventHandle shared{};

  private:
    int socket_;
};

}  // namespace phos::test
