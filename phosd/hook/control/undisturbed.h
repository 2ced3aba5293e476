#pragma once

#include <pthread.h>
#include <signal.h>

#include "base/process.h"

namespace phos {

// Held while a thread of the program has one of the hook's locks or sockets: it is not cancelled,
// and no signal handler runs, out of which it might jump. Its errno stays as it was.
class Undisturbed {
  public:
    Undisturbed() {
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel_);
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &signals_);
    }
    ~Undisturbed() {
        pthread_sigmask(SIG_SETMASK, &signals_, nullptr);
        pthread_setcancelstate(cancel_, nullptr);
    }
    Undisturbed(const Undisturbed&) = delete;
    Undisturbed& operator=(const Undisturbed&) = delete;

  private:
    KeepErrno errno_;
    int cancel_ = 0;
    sigset_t signals_;
};

}  // namespace phos
