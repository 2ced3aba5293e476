// The options --phos=save|none, --phos-images=URL and --phos-key=KEY of sbatch, salloc and srun:
// they are in the environment of what the job runs, where `phos run` looks for them. Slurm loads
// this library into its commands and slurmstepd by a line of plugstack.conf
// (docs/operate/slurm.md), and needs no more of it than this.

#include <cinttypes>
#include <csignal>
#include <cstdlib>
#include <cstring>

extern "C" {  // which the header leaves to us
#include <slurm/spank.h>
}

namespace {

// `phos run` sets it when it becomes a step (phosd/cli/run_command/slurm.py).
constexpr const char* kStepOfPhosRun = "PHOS_SLURM_OUTPUTS";
enum Kind { kWish, kImages, kKey, kKinds };
constexpr const char* kVariables[kKinds] = {"PHOS_SLURM", "PHOS_SLURM_IMAGES", "PHOS_SLURM_KEY"};
char g_values[kKinds][4096];

int take(int kind, const char* value, int) {
    const char* const given = value == nullptr ? "" : value;
    if (kind == kWish && std::strcmp(given, "save") != 0 && std::strcmp(given, "none") != 0) {
        slurm_error("--phos=%s: the option is save or none; nothing was submitted", given);
        return ESPANK_BAD_ARG;
    }
    if (given[0] == '\0' || std::strlen(given) >= sizeof g_values[kind]) {
        slurm_error("--phos-%s: it is empty or too long; nothing was submitted",
                    kind == kImages ? "images" : "key");
        return ESPANK_BAD_ARG;
    }
    std::strcpy(g_values[kind], given);
    return ESPANK_SUCCESS;
}

spank_option g_options[kKinds] = {
    {const_cast<char*>("phos"), const_cast<char*>("save|none"),
     const_cast<char*>("have `phos run` save its program when the job is to end, and go on with it "
                       "when the job is requeued"),
     1, kWish, take},
    {const_cast<char*>("phos-images"), const_cast<char*>("URL"),
     const_cast<char*>("with --phos=save: bring images there, from where any node goes on"), 1,
     kImages, take},
    {const_cast<char*>("phos-key"), const_cast<char*>("KEY"),
     const_cast<char*>("with --phos-images: the SSH key that signs them"), 1, kKey, take},
};

}  // namespace

#define PHOS_EXPORTED extern "C" __attribute__((visibility("default")))

PHOS_EXPORTED const char plugin_name[] = "phos";
PHOS_EXPORTED const char plugin_type[] = "spank";
PHOS_EXPORTED const unsigned int plugin_version = SLURM_VERSION_NUMBER;
PHOS_EXPORTED const unsigned int spank_plugin_version = 1;

PHOS_EXPORTED int slurm_spank_init(spank_t spank, int, char**) {
    const spank_context_t context = spank_context();
    if (context == S_CTX_SLURMD || context == S_CTX_JOB_SCRIPT) {
        return ESPANK_SUCCESS;  // nobody gives them options
    }
    for (spank_option& option : g_options) {
        const spank_err_t done = spank_option_register(spank, &option);
        if (done != ESPANK_SUCCESS) {
            return done;
        }
    }
    return ESPANK_SUCCESS;
}

// In slurmstepd, for each task, in its process. Without the option the environment stays as it is:
// a job that was submitted in one with the variable has it, as it has all others.
PHOS_EXPORTED int slurm_spank_task_init(spank_t spank, int, char**) {
    char value[2];
    const spank_err_t found = spank_getenv(spank, kStepOfPhosRun, value, sizeof value);
    if (found == ESPANK_SUCCESS || found == ESPANK_NOSPACE) {
        // It takes SIGTERM from then on that it has handlers; before, it would end by it.
        sigset_t term;
        sigemptyset(&term);
        sigaddset(&term, SIGTERM);
        sigprocmask(SIG_BLOCK, &term, nullptr);
    }
    for (int kind = 0; kind < kKinds; ++kind) {
        if (g_values[kind][0] == '\0') {
            continue;
        }
        const spank_err_t done = spank_setenv(spank, kVariables[kind], g_values[kind], 1);
        if (done != ESPANK_SUCCESS) {
            slurm_error("%s=%s cannot be set: %s; the job is as without the option",
                        kVariables[kind], g_values[kind], spank_strerror(done));
            return done;
        }
    }
    return ESPANK_SUCCESS;
}
