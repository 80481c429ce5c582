#ifndef TOKENWIRE_EXAMPLE_ERROR_H_
#define TOKENWIRE_EXAMPLE_ERROR_H_

#include <string>
#include <vector>

#include <grpcpp/support/status.h>

// Why a call failed, from the google.rpc details of its status.
struct Error {
  // What programs branch on; empty where the server did not send the status.
  std::string reason;
  // Paths of the fields at fault.
  std::vector<std::string> fields;
};

Error ErrorOf(const grpc::Status& status);

#endif
