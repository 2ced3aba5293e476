// Answer each request of a client (docs/reference/hook-protocol.md). server.cpp has checked the
// client, and the state of the gate.
#pragma once

#include <string>
#include <vector>

#include "base/channel.h"
#include "park/park.h"

namespace phos::handlers {

struct Reply {
    wire::Status status = wire::Status::ok;
    std::vector<unsigned char> payload;
    std::vector<int> descriptors;  // sent, then released

    Reply() = default;
    Reply(wire::Status failed, const std::string& text) : status(failed) {
        append(text.data(), text.size());
    }
    explicit Reply(const Outcome& outcome) : status(outcome.status) {
        if (status == wire::Status::ok)
            append(wire::Count{outcome.count});
        else
            append(outcome.text.data(), outcome.text.size());
    }
    void append(const void* bytes, size_t size) {
        const auto* first = static_cast<const unsigned char*>(bytes);
        payload.insert(payload.end(), first, first + size);
    }
    template <class T>
    void append(const T& value) {
        append(&value, sizeof value);
    }
};

Reply hello(bool never_stopped);
Reply list_blocks(const channel::Message& request, bool with_descriptors);
Reply close_gate(const channel::Message& request);
Reply seal_gate();
Reply park_all();
Reply hand_back(channel::Message& request);
Reply make_blocks(const channel::Message& request);
Reply blocks_filled(const channel::Message& request, bool renewed);
Reply unpark_all();
Reply reexport_blocks(const channel::Message& request);
Reply arm(int client, const channel::Message& request);
Reply disarm();
Reply forget();
Reply list_kernels(const channel::Message& request);
Reply list_launches(const channel::Message& request);
Reply list_images(const channel::Message& request);
Reply take_summaries(const channel::Message& request);
Reply empty_cache(const channel::Message& request);
Reply stats();
Reply program(int client, const channel::Message& request);
Reply may_see(const channel::Message& request);
Reply unfinished();

// Ends counting launches: when its time is over, or at once.
void tidy();
void stop_counting();

}  // namespace phos::handlers
