// It is loaded, and that is all.
extern "C" int phos_test_stub() {
    return 0;
}
